"""The README's commands, run as they stand there, on the real model.

Two minutes: it compiles the model twice, for every instruction set, as a reader would.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from commands import command, environment, flexspec
from real_model import MODEL, NEEDS_MODEL

from repository import ROOT

_ADDRESS = re.compile(r"on (http://127\.0\.0\.1:\d+)")
_LONG = ("tune",)  # hours

pytestmark = NEEDS_MODEL


def readme_commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line[9:]) for block in blocks for line in block.splitlines() if line.startswith("flexspec ")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name: the model where the demo puts it, the shipped SSM and examples."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "build" / "models").mkdir(parents=True)
    (folder / "build" / "models" / MODEL.name).symlink_to(MODEL)
    for name in ("ssm", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_every_command_works_as_written(here: Path) -> None:
    ran = []
    for words in readme_commands():
        ran.append(words[0])
        if words[0] == "serve":
            serve(here, words)
        elif words[0] not in _LONG:
            done = flexspec(*words, cwd=here)
            assert done.returncode == 0 and done.stdout, f"{words}: {done.stderr}"
    assert {"compile", "generate", "serve", "inspect", "plan"} <= set(ran)


def serve(here: Path, words: list[str]) -> None:
    """Start it, ask a question, end it as a user does. A port of its own, lest another server be asked."""
    words = [word for i, word in enumerate(words) if "--port" not in (word, words[i - 1])]
    process = subprocess.Popen(
        command(*words, "--port", "0"), cwd=here, env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        said: list[str] = []
        while not (said and (found := _ADDRESS.search(said[-1]))):
            said.append(process.stderr.readline())
            assert said[-1], said
        model = Path(words[1]).name.removesuffix(".fspec")
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=120.0).json()
        assert answer["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
