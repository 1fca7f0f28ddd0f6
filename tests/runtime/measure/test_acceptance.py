"""``flexspec bench --acceptance``: a measured profile that the planner reads; wrong input is told at once."""

from __future__ import annotations

import json
from pathlib import Path

import artifacts
import pytest

from flexspec.cli import main as cli
from flexspec.compiler.prices.acceptance_profile import open_acceptance
from flexspec.errors import ProfileError
from flexspec.runtime.measure.acceptance import PROMPTS, RoundCounter, read_prompts


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.compile_tiny(tmp_path_factory.mktemp("bench"))


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_profile_is_measured_and_read_back(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "profile.json"
    prompts.write_text('{"prompt": "hello"}\n\n{"turns": ["a b c", "more"]}\n')
    arguments = [str(artifact), "--acceptance", "--prompts", str(prompts), "--max-tokens", "12", "-o", str(out)]
    drafts = [
        "--draft",
        "chain:2/sources=ssm",
        "--draft",
        "tree:2,1/sources=ssm",
        "--ssm-name",
        "tiny-ssm",
        "--llm-name",
        "tiny",
    ]
    code, page, _ = bench(capsys, *arguments, *drafts)
    assert code == 0 and "tree:2,1" in page
    profile = open_acceptance(str(out))
    assert (profile.llm, profile.ssms) == ("tiny", ("tiny-ssm",)) and "2 of p.jsonl, 12 new tokens" in profile.prompts
    assert [str(entry.draft) for entry in profile.entries] == ["chain:2/sources=ssm", "tree:2,1/sources=ssm"]
    chain, tree = profile.entries
    assert (chain.most_nodes, tree.most_nodes) == (2, 4)
    assert 1 <= chain.committed_tokens <= 3 and 0 < chain.levels[1] <= chain.levels[0] <= 1 < tree.levels[0] <= 2
    again = json.loads(bench(capsys, *arguments, *drafts, "--json")[1])
    assert again == json.loads(out.read_text()), "rounds do not depend on times"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--acceptance"),
        (["--acceptance", "--count", "0"], "--count 0"),
        (["--acceptance", "--draft", "off"], "draft plan off"),
        (["--acceptance", "--draft", "budget:8"], "drafts with SSMs"),
        (["--acceptance", "--draft", "tree:2,1", "--draft", "tree:2,1/sources=ssm"], "twice"),
        (["--acceptance", "--draft", "sideways"], "method 'sideways'"),
        (["--acceptance", "--draft", "chain:2/sources=ssm2"], "no ssm2"),
        (["--acceptance", "--prompts", "nothing.jsonl"], "nothing.jsonl"),
    ],
)
def test_wrong_input_is_told(
    artifact: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = bench(capsys, str(artifact), *arguments)
    assert code == 2 and out == "" and message in err and "Fix:" in err


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    assert len(set(read_prompts(PROMPTS, 13))) == 13 and len(read_prompts(PROMPTS, 999)) == 48
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(i)}) for i in range(10)))
    assert read_prompts(path, 3) == ["0", "3", "6"]
    for bad in ("{", "[1]", '{"prompt": ""}', '{"prompt": 3}', '{"turns": []}', "7"):
        path.write_text('{"prompt": "x"}\n' + bad)
        with pytest.raises(ProfileError, match="line 2"):
            read_prompts(path, 3)
    path.write_text("\n")
    with pytest.raises(ProfileError, match="no prompts"):
        read_prompts(path, 3)


def test_a_round_of_several_sources_is_counted_once() -> None:
    counter = RoundCounter()
    counter.record_round("ssm", (2, 1), (1, 0), 2)
    counter.record_round("ssm2", (1,), (0,), 0)
    counter.record_round("off", (), (), 1)
    assert (counter.rounds, counter.committed, counter.levels) == (2, 3, [3, 1])
