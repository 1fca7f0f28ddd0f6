"""``flexspec plan``: the page is frozen, every form works, wrong input is one line that says what to do."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flexspec.cli import main as cli
from flexspec.compiler.artifact.plan import plan_from_json
from flexspec.compiler.prices.machine import MACHINES
from repository import ROOT

CONFIGS = ROOT / "examples" / "configs"
GOLDEN = ROOT / "tests" / "golden" / "plan_llama_65b_a10x4x2.txt"
PAPER = [
    "plan", str(CONFIGS / "llama-65b.json"), "--ssm", str(CONFIGS / "llama-68m.json"), "--machine", "a10x4x2",
    "--context", "512",
]  # fmt: skip
SLOW = "alpha_us = { value = 30000.0, correction = 1.0"
HAND = """
ssm = "first"
[[stages]]
blocks = 40
devices = [0, 1, 2, 3]
[[stages]]
blocks = 40
devices = [4, 5, 6, 7]
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main([*PAPER, *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_page_is_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    """FLEXSPEC_UPDATE_GOLDEN=1 writes it anew: read it as a user would before committing it."""
    code, out, _ = run(capsys, "--requests", "4", "--prove")
    assert code == 0
    if os.environ.get("FLEXSPEC_UPDATE_GOLDEN"):
        GOLDEN.write_text(out)
    assert out == GOLDEN.read_text()


def test_stored_weights_stand_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--dtype", "f32", "--weights", "f16")
    assert code == 0 and "f32, weights f16; least time per token" in out


@pytest.mark.parametrize("place", ["own", "all"])
def test_drafting_elsewhere_costs_a_message_each_way(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    slow, hand = tmp_path / "slow.toml", tmp_path / "hand.toml"
    text = (MACHINES / "a10x4.toml").read_text()
    slow.write_text(re.sub(r"alpha_us = \{ value = [0-9.]+, correction = [0-9.]+", SLOW, text))
    devices = "ssm_devices = [1]" if place == "own" else ""
    hand.write_text(f'ssm = "{place}"\n{devices}\n[[stages]]\nblocks = 32\ndevices = [0]\n')
    model = [str(CONFIGS / "llama-7b.json"), "--ssm", str(CONFIGS / "llama-68m.json"), "--machine", str(slow)]
    assert cli.main(["plan", *model, "--score", str(hand)]) == 0
    assert "ids out and back          60.00 ms" in capsys.readouterr().out


def test_json_holds_the_plan_and_its_proof(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    code, out, _ = run(capsys, "--json", "--prove", "-o", str(path), "--svg", str(picture))
    body = json.loads(out)
    plan = plan_from_json(body["plan"])
    assert code == 0 and plan_from_json(json.loads(path.read_text())) == plan
    assert [stage.degree for stage in plan.stages] == [4, 4] and plan.devices[:8] == tuple(range(8))
    assert (
        dict(plan.certificate)["proven"] is True
        and body["certificate"] == dict(plan.certificate)
        and plan.ladder.rungs[0][0] == 1
    )
    assert sum(body["round_us"].values()) == pytest.approx(dict(plan.predicted)["period_us"])
    assert body["free_bytes"] == min(row["device has"] - row["total"] for row in body["memory_bytes"]) > 0
    assert [[rung["batch"], rung["draft"]] for rung in body["ladder"]] == plan.to_json()["ladder"]
    assert body["constants"]["devices.A10.memory_bytes"]["origin"] == "NVIDIA A10 datasheet"
    root = ElementTree.fromstring(picture.read_text())
    assert len([each for each in root.iter() if each.tag.endswith("rect")]) > 16


def test_a_hand_written_plan_is_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "hand.toml"
    path.write_text(HAND)
    code, out, _ = run(capsys, "--score", str(path), "--json")
    priced = json.loads(out)
    best = json.loads(run(capsys, "--json")[1])
    assert code == 0 and priced["per_token_us"] >= dict(best["plan"]["predicted"])["per_token_us"]
    code, out, _ = run(capsys, "--score", str(path))
    assert code == 0 and "BESIDE THE BEST" in out and "TP 4  A10 0-3" in out
    path.write_text('draft = "off"\nmicro_batches = 1\n' + HAND)
    assert json.loads(run(capsys, "--score", str(path), "--json")[1])["per_token_us"] > priced["per_token_us"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("blocks = 40", "blocks = 39", "stages: 79 blocks; expected 80"),
        ("[4, 5, 6, 7]", "[3, 4, 5, 6]", "device 3 again"),
        ("[4, 5, 6, 7]", "[4, 5, 6, 8]", "device 8"),
        ("[4, 5, 6, 7]", "[4, 5, 6, -1]", "stages[1].devices: [4, 5, 6, -1]"),
        ("[0, 1, 2, 3]", "[0, 1]", "hand.toml: a rank of stage 0 (40 blocks, degree 2, A10) needs"),
        ("[0, 1, 2, 3]", "[0, 1, 2]", "stage 0 of degree 3"),
        ("[4, 5, 6, 7]", "[]", "at least one device"),
        ('ssm = "first"', 'ssm = "middle"', "ssm: 'middle'; expected one of none, own"),
        ('ssm = "first"', 'ssm = "own"', "ssm_devices"),
        ('ssm = "first"', 'colour = "red"', "colour: an unknown key"),
        ('ssm = "first"', 'draft = "chain:63"', "one of the acceptance profile"),
        ('ssm = "first"', 'draft = "chain:99"', "draft: 'chain:99': depth 99; expected a number from 1 to 64"),
        ('ssm = "first"', "batch = 7", "batch 7"),
        ('ssm = "first"', "micro_batches = 2", "2 micro-batches of 1 requests"),
        ('ssm = "first"', "ssm = []", "ssm: []"),
        ('ssm = "first"', "draft = 5", "draft: 5; expected a text"),
        ('ssm = "first"', "batch = true", "batch: True; expected a whole number"),
        ("blocks = 40", "blocks = 4.5", "stages[0].blocks: 4.5; expected a whole number"),
        ("[4, 5, 6, 7]", '"all"', "stages[1].devices: 'all'; expected a list of whole numbers"),
        ("[4, 5, 6, 7]", "[4, 5, 6, 99999999999]", "stages[1].devices: [4, 5, 6, 99999999999]"),
        ("[[stages]]", "[[stages]", "hand.toml: Expected ']]'"),
        ("blocks = 40", "blocks = nan", "stages[0].blocks: nan"),
        ("blocks = 40", "blocks = 1e300", "stages[0].blocks: 1e+300"),
        ("blocks = 40", f"blocks = {'9' * 5000}", "hand.toml: Exceeds the limit (4300 digits)"),
        ("blocks = 40", 'blocks = 40\ncolour = "red"', "stages[0].colour: an unknown key"),
        ("[0, 1, 2, 3]", "[0, 0, 1, 2]", "device 0 again"),
        ('ssm = "first"', 'ssm = "none"\ndraft = "chain:8/sources=ssm"', "one of the acceptance profile: off"),
        ('ssm = "first"', 'ssm = "own"\nssm_devices = [0]', "device 0 again"),
        ('ssm = "first"', 'ssm = "first"\nssm_devices = [77]', "ssm_devices: [77] with ssm = 'first'"),
        ('ssm = "first"', "batch = 0", "batch: 0"),
    ],
)
def test_wrong_plans_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "hand.toml"
    path.write_text(HAND.replace(old, new, 1))
    code, _, err = run(capsys, "--score", str(path))
    assert code == 2 and message in err and "Fix:" in err


@pytest.mark.slow(reason="searches plans of 65B")
def test_a_plan_that_was_written_is_priced_as_it_was_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for requests in ("1", "4"):
        best = json.loads(run(capsys, "--requests", requests, "--json", "-o", str(path))[1])
        code, out, _ = run(capsys, "--requests", requests, "--score", str(path), "--json")
        assert code == 0
        assert json.loads(out)["per_token_us"] == pytest.approx(best["plan"]["predicted"]["per_token_us"], rel=1e-9)
    body = json.loads(path.read_text())
    body["stages"][1]["first_block"] += 1
    path.write_text(json.dumps(body))
    code, _, err = run(capsys, "--score", str(path))
    assert code == 2 and "plan.json: stages[1].first_block: 42; expected 41, where the stage before ends" in err


def test_a_plan_keeps_the_devices_it_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, picture = tmp_path / "hand.toml", tmp_path / "hand.svg"
    path.write_text(
        HAND.replace("[0, 1, 2, 3]", "[9]").replace("[4, 5, 6, 7]", "[3, 1, 0, 2]").replace("[9]", "[4, 5, 6, 7]")
    )
    code, out, _ = run(capsys, "--score", str(path), "--svg", str(picture))
    assert code == 0 and "stage 0: blocks 0-39    TP 4  A10 4-7" in out and "A10 3,1,0,2" in out
    assert ">4: stage 0<" in picture.read_text() and ">0: stage 1<" in picture.read_text()


def test_a_node_is_not_entered_twice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "hand.toml"
    stages = [(30, [0, 1]), (30, [4, 5, 6, 7]), (20, [2, 3])]
    path.write_text("\n".join(f"[[stages]]\nblocks = {n}\ndevices = {held}" for n, held in stages))
    code, _, err = run(capsys, "--score", str(path))
    assert code == 2 and "stage 2 returns to node 0" in err


def test_stages_stay_inside_a_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "hand.toml"
    path.write_text(HAND.replace("[0, 1, 2, 3]", "[0, 1, 2, 4]").replace("[4, 5, 6, 7]", "[3, 5, 6, 7]"))
    code, _, err = run(capsys, "--score", str(path))
    assert code == 2 and "2 nodes" in err


def test_every_device_is_accounted_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A bar for each stage and for a device that only drafts; the others are said to be idle."""
    path = tmp_path / "hand.toml"
    path.write_text(HAND.replace('"first"', '"own"\nssm_devices = [7]').replace("[4, 5, 6, 7]", "[4, 5]"))
    code, _, err = run(capsys, "--score", str(path))
    assert code == 2 and "a rank of stage 1 (40 blocks, degree 2, A10) needs" in err and "weights" in err
    small = ["--score", str(path), "--machine", "a100x8"]
    path.write_text(path.read_text().replace("[7]", "[6]"))
    picture = tmp_path / "hand.svg"
    code, out, _ = run(capsys, *small, "--svg", str(picture))
    boxes = [text for text in re.findall(r">(\d+: [^<]+)<", picture.read_text()) if not text.startswith("node")]
    assert boxes[3:] == ["3: stage 0", "4: stage 1", "5: stage 1", "6: SSM", "7: idle"]
    rows = out[out.index("MEMORY") : out.index("BESIDE")].splitlines()[1:-1]
    assert code == 0 and "own 6;" in out
    assert [row.split("|")[0].strip() for row in rows] == [
        "stage 0, 0-3", "stage 1, 4-5", "SSM, 6", "1 device holds nothing", rows[-1].strip(),
    ]  # fmt: skip
    assert "more tokens of each request" in rows[-1]


def test_one_stage_is_the_first_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    """What is one plan under two names is not its own runner-up."""
    code, out, _ = run(capsys, "--machine", "h100x8", "--requests", "2")
    runners = out[out.index("RUNNERS-UP") : out.index("WHY NOT")]
    assert code == 0 and "SSM data parallel over all devices; draft plan" in out
    assert "TP 8 (80 blocks), SSM on the last" not in runners
    assert runners.count("times the time: TP 8 (80 blocks), SSM with stage 0") == 1


@pytest.mark.slow(reason="searches plans of 65B")
def test_front_and_machines(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--pareto", "--requests", "4", "--json")
    rows = json.loads(out)
    assert code == 0 and len(rows) >= 2 and rows[0]["ms_per_token"] < rows[-1]["ms_per_token"]
    assert "tokens/s" in run(capsys, "--pareto")[1]
    assert cli.main(["plan", "--machine", "list"]) == 0
    assert "SpecInfer test bed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "abacus"], "machine 'abacus'; expected a .toml file"),
        (["--machine", "no/such.toml"], "machine 'no/such.toml': does not exist; expected a .toml file"),
        (["--acceptance", "such.json"], "acceptance profile 'such.json': does not exist; expected a .json file"),
        (["--acceptance", "abacus"], "acceptance profile 'abacus'"),
        (["--requests", "0"], "0 requests"),
        (["--context", "999999"], "1 to 2048"),
        (["--objective", "goodput"], "--limit-ms"),
        (["--objective", "goodput", "--limit-ms", "0.001"], "not 0.001 ms"),
        (["--degrees", "2,x"], "--degrees 2,x"),
        (["--machine", "a10"], "no plan of llama-65b on a10 fits"),
        (["--ssm", str(CONFIGS / "opt-125m.json")], "vocabulary of 50272"),
        (["--objective", "goodput", "--limit-ms", "nan"], "--limit-ms"),
        (["--degrees", "64"], "no plan of llama-65b on a10x4x2 fits"),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pareto", "-o", "x.json"], "--pareto with --output"),
        (["--pareto", "--svg", "x.svg"], "--pareto with --svg"),
        (["--pareto", "--prove"], "--pareto with --prove"),
        (["--score", "x.toml", "--prove"], "--score with --prove"),
        (["--score", "x.toml", "--pareto"], "--pareto with --score"),
        (["--compare", "--prove"], "--compare with --prove"),
        (["--limit-ms", "25"], "--limit-ms with --objective latency; expected --objective goodput"),
        (["--turns", "3"], "--turns without --compare"),
        (["-o", "no/such/plan.json"], "--output no/such/plan.json: the folder no/such does not exist"),
        (["--svg", "no/plan.svg"], "--svg no/plan.svg: the folder no does not exist"),
        (["-o", "."], "--output ., which is a folder"),
    ],
)
def test_options_are_honoured_or_refused_before_the_search(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("flexspec.compiler.planner.search.search")
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err and "Fix:" in err and not list(tmp_path.iterdir())


def test_a_priced_plan_is_written_on_its_own_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, written = tmp_path / "hand.toml", tmp_path / "priced.json"
    swapped = HAND.replace("[0, 1, 2, 3]", "[9]").replace("[4, 5, 6, 7]", "[3, 1, 0, 2]")
    path.write_text('draft = "chain:8/sources=ssm"\n' + swapped.replace("[9]", "[4, 5, 6, 7]"))
    both = ["--requests", "4", "--json"]
    code, out, err = run(capsys, *both, "--score", str(path), "-o", str(written))
    priced, plan = json.loads(out), plan_from_json(json.loads(written.read_text()))
    assert code == 0 and err == f"plan written to {written}\n" and plan_from_json(priced["plan"]) == plan
    assert plan.devices == (4, 5, 6, 7, 3, 1, 0, 2) and plan.origin == "hand"
    assert {str(draft) for _, draft in plan.ladder.rungs} == {"chain:8/sources=ssm"}
    again = json.loads(run(capsys, *both, "--score", str(written))[1])
    assert again["per_token_us"] == pytest.approx(priced["per_token_us"], rel=1e-9)
    assert plan_from_json(again["plan"]) == plan  # a plan in JSON keeps its ladder


@pytest.mark.slow(reason="searches plans of 65B")
def test_a_degree_that_misses_the_limit_is_not_said_to_be_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    goodput = ["--requests", "8", "--machine", "l40sx4", "--objective", "goodput", "--limit-ms"]
    code, out, _ = run(capsys, *goodput, "30")
    reasons = out[out.index("WHY NOT") : out.index("NOTES")]
    assert code == 0 and "TP 2: misses the limit: " in reasons and "of 30 (" in reasons
    assert "does not fit" not in reasons


@pytest.mark.slow(reason="searches plans of 65B")
def test_what_misses_the_limit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    goodput = ["--requests", "8", "--machine", "l40sx4", "--objective", "goodput", "--limit-ms", "25"]
    body = json.loads(run(capsys, *goodput, "--json")[1])
    late = [rung["batch"] for rung in body["ladder"] if rung["ms_per_token"] > 25]
    most = max(rung["batch"] for rung in body["ladder"] if rung["batch"] not in late)
    assert late and body["max_requests"] == most == min(late) // 2
    assert [rung["batch"] for rung in body["ladder"] if not rung["within_limit"]] == late
    out = run(capsys, *goodput)[1]
    marked = [int(line.split()[0]) for line in out.splitlines() if line.endswith("(misses the limit)")]
    assert "up to 8 requests at once" in out and marked == late
    assert f"{min(late)} at once would take " in out and f"--max-requests {most}\n" in out
    out = run(capsys, *goodput[:-1], "9999")[1]
    assert "--max-requests" not in out and "misses the limit" not in out


@pytest.mark.slow(reason="searches plans of 65B")
def test_the_parts_of_a_stage_add_up_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--requests", "8", "--machine", "l40sx4"], ["--machine", "h100x64"]):
        body = json.loads(run(capsys, "--json", *arguments)[1])
        stages = [us for name, us in body["round_us"].items() if name.startswith("verify")]
        parts = [{name: us for name, us in stage.items() if name.endswith("_us")} for stage in body["stages"]]
        verifying = [sum(each.values()) - each["draft_us"] - each["messages_us"] for each in parts]
        assert verifying == pytest.approx(stages, rel=1e-9)
        assert all(each["operators_us"] > each["collectives_us"] > 0 for each in parts)


def test_models_without_a_shipped_profile_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(CONFIGS / "opt-30b.json"), "--ssm", str(CONFIGS / "opt-125m.json"), "--machine", "a10x4"]
    assert cli.main(arguments) == 2
    assert "no acceptance profile for opt-125m" in capsys.readouterr().err
    assert cli.main([*arguments, "--acceptance", "specinfer-llama-7b"]) == 0
    out = capsys.readouterr().out
    assert "priced only, not served" in out and "measured with llama-7b, not with opt-30b" in out


def test_a_machine_file_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((MACHINES / "h100x8.toml").read_text().replace("devices = 8", "devices = 6", 1))
    code, out, _ = run(capsys, "--machine", str(path))
    assert code == 0 and "(6 devices, 1 node)" in out
    assert "no model" in (cli.main(["plan", "--machine", "a10"]), capsys.readouterr().err)[1]
