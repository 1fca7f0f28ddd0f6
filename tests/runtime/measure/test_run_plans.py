"""``flexspec plan --compare``: two plans really run here, every field is there and the sums agree; refusals."""

from __future__ import annotations

import json
from pathlib import Path

import artifacts
import pytest
from commands import flexspec

from flexspec.cli import main as cli
from flexspec.compiler.prices.machine import MACHINES, open_machine
from flexspec.compiler.prices.plan_models import open_profile
from flexspec.compiler.prices.problem import Problem
from flexspec.draft_plan import DraftPlan
from flexspec.errors import PlanError
from flexspec.runtime.local_ranks import host_cores
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


@pytest.mark.skipif(host_cores() < 2, reason="needs a core for each of two ranks")
def test_two_plans_run_and_are_told_line_by_line(models: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "one.toml").write_text(ONE)
    (tmp_path / "two.toml").write_text(TWO)
    plans = [str(tmp_path / "one.toml"), str(tmp_path / "two.toml")]
    done = flexspec(*arguments(models), "--requests", "2", "--turns", "1", "--json", "--compare", *plans)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert -1 <= body["spearman"] <= 1 and body["worst_ratio"] >= 1
    one, two = body["plans"]
    assert (one["rows"], two["rows"], two["stages"]) == (2 * 11, 2 * 3, [[0, 1, [0]], [1, 2, [1]]])
    for plan in (one, two):
        sums = {line["part"]: line for line in plan["lines"] if line["what"] == "all"}
        for key in ("predicted_us", "measured_us"):
            assert sum(line[key] for line in sums.values()) == pytest.approx(plan[key])
            for part, line in sums.items():
                own = [each[key] for each in plan["lines"] if each["part"] == part and each["what"] != "all"]
                assert not own or sum(own) == pytest.approx(line[key])
        assert plan["measured_us"] > 0 and plan["rounds"] >= 1
        classes = {line["what"] for line in plan["lines"] if line["part"] == "stage 0" and line["measured_us"] > 0}
        assert {"embedding", "rms_norm", "linear_group", "rope", "attention", "linear_add", "linear_swiglu"} <= classes
    assert list(sums) == ["draft", "stage 0", "hop 0-1", "stage 1", "messages", "host"]
    assert all(line["measured_us"] > 0 for line in sums.values())


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


def test_the_list_has_what_the_machine_can_run(models: tuple[Path, Path]) -> None:
    trials = trials_of_machine(problem(models))
    layouts = {tuple(stage.degree for stage in trial.stages) for trial in trials}
    assert layouts == ({(1,), (1, 1), (2,)} if host_cores() > 1 else {(1,)})
    assert {trial.batch for trial in trials} == {1, 2, 4}
    assert {trial.place.name for trial in trials} == {"none", "first"}
    assert len(trials_of_machine(problem(models, requests=1))) < len(trials)


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


def test_more_ranks_than_cores_and_no_weights(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tmp_path / "wide.toml"
    many = 1 << host_cores().bit_length()
    text = (MACHINES / "cpu2.toml").read_text().replace("devices = 2", f"devices = {many}")
    (tmp_path / "many.toml").write_text(text)
    devices = ", ".join(map(str, range(many)))
    wide.write_text(f'draft = "off"\n[[stages]]\nblocks = 2\ndevices = [{devices}]\n')
    asked = [*arguments(models), "--machine", str(tmp_path / "many.toml"), "--degrees", f"1,{many}"]
    code = cli.main([*asked, "--compare", str(wide)])
    err = capsys.readouterr().err
    assert code == 2 and (f"a plan of {many} ranks" in err or f"of degree {many}" in err)
    config = models[1] / "config.json"
    assert cli.main(["plan", str(config), "--machine", "cpu2", "--context", "64", "--compare"]) == 2
    assert "a model without weights" in capsys.readouterr().err
