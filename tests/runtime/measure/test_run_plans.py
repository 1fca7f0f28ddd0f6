"""``flexspec plan --compare``: two plans really run here, every field is there and the sums agree; refusals."""

from __future__ import annotations

import json
from pathlib import Path

import artifacts
import numpy as np
import pytest
from commands import flexspec

from flexspec.cli import main as cli
from flexspec.compiler.pages.predicted_lines import ALL, BETWEEN, DRAFT, HOST, MESSAGES
from flexspec.compiler.prices.machine import open_machine
from flexspec.compiler.prices.plan_models import open_profile
from flexspec.compiler.prices.problem import Problem
from flexspec.draft_plan import DraftPlan
from flexspec.errors import PlanError
from flexspec.host.cores import usable_cores
from flexspec.runtime.measure import trials
from flexspec.runtime.measure.round_runs import MeasuredRound
from flexspec.runtime.measure.run_plans import complete_rounds
from flexspec.runtime.measure.trials import draft_entry, trials_of_machine
from flexspec.types import DType

ONE = 'draft = "tree:2,2,1/sources=ssm"\n[[stages]]\nblocks = 2\ndevices = [0]\n'
TWO = 'draft = "chain:2/sources=ssm"\n[[stages]]\nblocks = 1\ndevices = [0]\n[[stages]]\nblocks = 1\ndevices = [1]\n'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return artifacts.write_models(tmp_path_factory.mktemp("models"))


def arguments(models: tuple[Path, Path]) -> list[str]:
    llm, ssm = models
    return ["plan", str(llm), "--ssm", str(ssm), "--machine", "cpu2", "--context", "64", "--dtype", "f32"]


@pytest.mark.ranks
@pytest.mark.skipif(usable_cores() < 2, reason="needs a core for each of two ranks")
def test_two_plans_run_and_are_told_line_by_line(models: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "one.toml").write_text(ONE)
    (tmp_path / "two.toml").write_text(TWO)
    plans = [str(tmp_path / "one.toml"), str(tmp_path / "two.toml")]
    done = flexspec(*arguments(models), "--requests", "2", "--turns", "1", "--json", "--compare", *plans)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    one, two = body["plans"]
    same_order = (one["predicted_us"] < two["predicted_us"]) == (one["measured_us"] < two["measured_us"])
    assert body["spearman"] == (1.0 if same_order else -1.0)
    ratios = [plan["measured_us"] / plan["predicted_us"] for plan in (one, two)]
    assert body["worst_ratio"] == pytest.approx(max(*ratios, *(1 / ratio for ratio in ratios)))
    assert (one["rows"], two["rows"], two["stages"]) == (2 * 11, 2 * 3, [[0, 1, [0]], [1, 2, [1]]])
    for plan in (one, two):
        sums = {line["part"]: line for line in plan["lines"] if line["what"] == "all"}
        for key in ("predicted_us", "measured_us"):
            assert sum(line[key] for line in sums.values()) == pytest.approx(plan[key])
            for part, line in sums.items():
                classes_us = [each[key] for each in plan["lines"] if each["part"] == part and each["what"] != "all"]
                assert not classes_us or sum(classes_us) == pytest.approx(line[key])
        assert plan["measured_us"] > 0 and plan["rounds"] >= 1
        classes = {line["what"] for line in plan["lines"] if line["part"] == "stage 0" and line["measured_us"] > 0}
        assert {"embedding", "rms_norm", "linear_group", "rope", "attention", "linear_add", "linear_swiglu"} <= classes
    assert list(sums) == ["draft", "stage 0", "hop 0-1", "stage 1", "messages", "host"]
    assert all(line["measured_us"] > 0 for line in sums.values())


@pytest.mark.parametrize(
    ("several", "draft_us", "expected"),
    [
        # One rank: what the engine calls verify beside the stages is the host's.
        (False, 300.0, {"draft between": 300 - 120, "host": 1000 - 300 - 400}),
        # Several: it is the messages' between rank 0 and the others.
        (True, 300.0, {"draft between": 300 - 120, "messages": 500 - 400, "host": 1000 - 300 - 500}),
        (True, 0.0, {"messages": 500 - 400, "host": 1000 - 500}),
    ],
)
def test_a_round_is_its_lines(several: bool, draft_us: float, expected: dict[str, float]) -> None:
    """A round of 1000 us, 500 of them to verify, in which stages were stamped for 400 and an SSM's programs for 120."""
    lines = {("stage 0", "linear"): np.array([250.0]), ("stage 1", "linear"): np.array([150.0])}
    if draft_us:
        lines[DRAFT, "linear"] = np.array([120.0])
    before = dict(lines)
    names = {(DRAFT, BETWEEN): "draft between", (MESSAGES, ALL): "messages", (HOST, ALL): "host"}
    whole = complete_rounds(lines, [MeasuredRound(1000.0, draft_us, 500.0, 7, [])], several)
    assert {names[line]: float(us[0]) for line, us in whole.items() if line not in before} == expected
    assert float(sum(us[0] for us in whole.values())) == 1000.0


def problem(models: tuple[Path, Path], requests: int = 4) -> Problem:
    llm = open_profile(models[0], DType.BF16, (1, 2))
    ssm = open_profile(models[1], DType.BF16, ssm=True)
    return Problem(open_machine("cpu2"), llm, (ssm,), (), requests, 64, degrees=(1, 2))


def test_drafts_have_the_rows_that_they_run(models: tuple[Path, Path]) -> None:
    asked = problem(models)
    chain = draft_entry(asked, DraftPlan.parse("chain:3/sources=ssm"))
    assert (chain.levels, chain.ssm_rows, chain.rows(2)) == ((1, 1, 1), (1, 1, 1), 8)
    tree = draft_entry(asked, DraftPlan.parse("tree:1,3,2,1"))
    assert tree.levels == (1, 3, 6, 6)
    assert tree.ssm_rows == (1, 1, 3, 9)  # the stem is fed once, branching levels again
    for text in ("budget:8", "chain:4/sources=suffix", "chain:4/sources=ssm2"):
        with pytest.raises(PlanError, match="whose rows are known"):
            draft_entry(asked, DraftPlan.parse(text))


@pytest.mark.parametrize(("cores", "layouts"), [(1, {(1,)}), (2, {(1,), (1, 1), (2,)}), (3, {(1,), (1, 1), (2,)})])
def test_the_list_has_what_the_machine_can_run(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, cores: int, layouts: set[tuple[int, ...]]
) -> None:
    """cpu2 has two devices, so a third core is of no use."""
    monkeypatch.setattr(trials, "usable_cores", lambda: cores)
    listed = trials_of_machine(problem(models))
    assert {tuple(stage.degree for stage in trial.stages) for trial in listed} == layouts
    assert {trial.batch for trial in listed} == {1, 2, 4}
    assert {trial.place.name for trial in listed} == {"none", "first"}
    assert len(trials_of_machine(problem(models, requests=1))) < len(listed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--machine", "a10"], "machine a10 of A10, no CPU"),
        (["--turns", "0"], "--turns 0"),
        (["--prove"], "--compare with --prove"),
        (["--compare", "no-such.toml"], "no-such.toml"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    code = cli.main([*arguments(models), "--compare", *change])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_more_ranks_than_cores_are_refused(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "usable_cores", lambda: 1)
    (tmp_path / "two.toml").write_text(TWO)
    code = cli.main([*arguments(models), "--compare", str(tmp_path / "two.toml")])
    assert code == 2 and "a plan of 2 ranks; expected at most 1, a core each" in capsys.readouterr().err


def test_a_model_without_weights_cannot_run(models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    config = models[1] / "config.json"
    assert cli.main(["plan", str(config), "--machine", "cpu2", "--context", "64", "--compare"]) == 2
    assert "a model without weights" in capsys.readouterr().err
