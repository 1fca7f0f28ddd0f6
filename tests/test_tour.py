"""docs/tour.md is honest: a real request and a real model enter its stops in order, and no file that it leaves out."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from artifacts import tiny_artifact, write_models
from prometheus_client import CollectorRegistry

from flexspec.cli.main import main
from flexspec.kernels.cpu.build import supported_isas
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.runtime.server.app import create_app
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.requests import ServerLimits
from repository import LINKED, ROOT, SOURCE_FOLDERS

# Errors are raised anywhere; the package file only looks whether the links are there.
EVERYWHERE = {"flexspec/errors.py", "flexspec/__init__.py"}


def route(title: str) -> tuple[list[str], set[str]]:
    """The stops of a route, and everything that its section names: files, and folders (with a slash at the end)."""
    page = (ROOT / "docs" / "tour.md").read_text()
    section = page[page.index(f"## {title}") :].split("\n## ")[0]
    return re.findall(r"^\d+\. \[`([^`]+)`", section, re.MULTILINE), set(re.findall(r"`([\w/]+(?:\.\w+|/))`", section))


@contextmanager
def files_entered() -> Iterator[Callable[[], list[str]]]:
    """Files of the project whose functions are called in the block, by any thread that starts in it, in first order."""
    paths: dict[str, None] = {}
    seen: dict[str, str | None] = {}

    def project_path(file: str) -> str | None:
        parts = Path(file).parts
        if not Path(file).is_relative_to(ROOT) or Path(file).suffix != ".py":
            return None
        inside = Path(*parts[len(ROOT.parts) :])
        if inside.parts[:1] == ("flexspec",) and inside.parts[1] in LINKED:
            inside = Path(*inside.parts[1:])
        return str(inside) if inside.parts[0] in SOURCE_FOLDERS else None

    def enter(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Classes and modules have bodies that run when they are imported: no request or model passes there.
        if event != "call" or code.co_name == "<module>" or not code.co_flags & 0x2:  # CO_NEWLOCALS: a function
            return
        if code.co_filename not in seen:
            seen[code.co_filename] = project_path(code.co_filename)
        path = seen[code.co_filename]
        if path is not None:
            paths.setdefault(path)

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        yield lambda: list(paths)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def check(title: str, entered: list[str], *, skipped: set[str]) -> None:
    """``skipped``: stops that are entered before the block, or are not Python."""
    stops, named = route(title)
    wanted = [stop for stop in stops if stop not in skipped]
    assert [path for path in entered if path in wanted] == wanted
    folders = tuple(name for name in named if name.endswith("/"))
    left_out = [path for path in entered if path not in named | EVERYWHERE and not path.startswith(folders)]
    assert left_out == [], f"docs/tour.md says nothing of these under {title}"
    missing = {name for name in named if "/" in name and not (ROOT / name).exists()}
    assert missing <= {"kernels/cpu/llm/program.cpp"}, "that one is in the artifact"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_enters_what_the_tour_names(temperature: float) -> None:
    metrics = Metrics(CollectorRegistry())
    served = open_engine(tiny_artifact(), ServeOptions(threads=1, measure=False), metrics)
    limits = ServerLimits(served.context_tokens)
    app = create_app(served.engine, served.tokenizer, served.chat, "tiny", metrics, limits)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello hello hello"}],
        "max_tokens": 24,
        "temperature": temperature,
        "stop": ["never said"],
        "stream": True,
    }

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post("/v1/chat/completions", json=body)

    def drive() -> None:
        served.engine.wanted.wait()
        while served.engine.step():
            pass

    with files_entered() as entered:
        engine_thread = threading.Thread(target=drive)
        engine_thread.start()
        answer = asyncio.run(ask())
        engine_thread.join()
    served.close()
    assert answer.status_code == 200 and "data: [DONE]" in answer.text
    check("Serving", entered(), skipped={"flexspec/cli/serve.py", "kernels/templates/cpu/attention.h"})


def test_a_model_enters_what_the_tour_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm, ssm = write_models(tmp_path)
    words = ["compile", llm, "--ssm", ssm, "-o", tmp_path / "tiny.fspec", "--isa", supported_isas()[0]]
    with files_entered() as entered:
        assert main([str(word) for word in words]) == 0
    check("Compiling", entered(), skipped=set())
