"""A device is three files: dropped in, ``--target`` compiles for it, ``--device`` offers it, and its executor runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from artifacts import PLAN, write_models
from rank_servers import PLANS

import flexspec.kernels.package.devices
import flexspec.runtime.backends
import flexspec.runtime.executors
from flexspec import LLM, SamplingParams
from flexspec.cli.main import build_parser
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftPlan
from flexspec.errors import ArtifactError, CapacityError
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.types import DType

PACKAGER = '''
"""What an abacus reads: float32 weights by name, and how many beads it has."""

from flexspec.compiler.artifact import layout
from flexspec.kernels.package.devices.registry import Packager
from flexspec.types import Role


class AbacusPackage:
    def __init__(self, inputs):
        self._writer, self._targets = inputs.writer, inputs.targets

    def add_model(self, name, graph, get):
        tensors = {value.name: get(value.name) for value in graph.inputs_of(Role.WEIGHT)}
        self._writer.add_tensors(layout.device_file("abacus", f"{name}.safetensors"), tensors)

    add_rank = add_model

    def finish(self):
        self._writer.add_json(layout.device_file("abacus", "beads.json"), {"targets": list(self._targets)})


PACKAGER = Packager(AbacusPackage, targets=("abacus-7", "abacus-13"))
'''
EXECUTOR = '''
"""Runs a graph on beads, which do what the torch references do."""

from flexspec.runtime.reference.executor import ReferenceExecutor


class AbacusExecutor(ReferenceExecutor):
    steps = 0

    def step(self, batch, **wanted):
        AbacusExecutor.steps += 1
        return super().step(batch, **wanted)
'''
BACKEND = '''
"""Beads on wires."""

from flexspec.compiler.artifact import layout
from flexspec.errors import ArtifactError, CapacityError
from flexspec.runtime.backends.registry import Backend

MOST_ROWS = 40


class AbacusKernels:
    name = "abacus-13"

    def __init__(self, artifact):
        self.artifact = artifact

    def executor(self, model, room):
        from flexspec.runtime.executors.abacus import AbacusExecutor

        weights = self.artifact.files.tensors(layout.device_file("abacus", f"{model}.safetensors"))
        return AbacusExecutor(self.artifact.graph(model), weights, room.pages, room.max_rows)


def _open(artifact, needs):
    if AbacusKernels.name not in artifact.manifest.targets:
        fix = f"{artifact.fix} --target {AbacusKernels.name}"
        raise ArtifactError(f"{artifact.name} holds {artifact.manifest.targets}", "beads", fix)
    if needs.tree_rows > MOST_ROWS:
        raise CapacityError(f"token trees of {needs.tree_rows} nodes", f"at most {MOST_ROWS}", "choose a smaller plan")
    return AbacusKernels(artifact)


BACKEND = Backend("abacus", _open, process_group="gloo", in_host_memory=True, help="beads")
'''
FILES: list[tuple[ModuleType, str]] = [
    (flexspec.kernels.package.devices, PACKAGER),
    (flexspec.runtime.executors, EXECUTOR),
    (flexspec.runtime.backends, BACKEND),
]


@pytest.fixture(autouse=True, scope="module")
def abacus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The device in files of its own, gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for package, text in FILES:
            folder = tmp_path_factory.mktemp("abacus")
            (folder / "abacus.py").write_text(text)
            patch.setattr(package, "__path__", [*package.__path__, str(folder)])
        yield
    for package, _ in FILES:
        sys.modules.pop(f"{package.__name__}.abacus", None)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("both"), supported_isas()[:1], ("abacus-13",))


def compiled(folder: Path, isas: tuple[str, ...], targets: tuple[str, ...], plan: str | None = None) -> Path:
    llm, ssm = write_models(folder)
    ranks = None if plan is None else PLANS[plan]
    options = CompileOptions(DType.F32, targets, isas, DraftPlan.parse(PLAN), plan=ranks)
    path, _ = compile_model(llm, [ssm], folder / "x.fspec", options, argv=["flexspec", "compile", "llm"])
    return path


def answer(artifact: Path, device: str, draft: str) -> list[int]:
    with LLM(artifact, device=device, draft=draft, threads=1, kv_tokens=512, measure=False) as llm:
        return list(llm.generate("hello 12", SamplingParams(max_tokens=12))[0].token_ids)


def test_its_executor_writes_what_the_cpu_writes(artifact: Path) -> None:
    from flexspec.runtime.executors.abacus import AbacusExecutor  # type: ignore[import-not-found,unused-ignore]

    before = AbacusExecutor.steps
    assert answer(artifact, "abacus", "budget:16") == answer(artifact, "cpu", "off") and AbacusExecutor.steps > before


def test_its_limits_are_refused_at_start(artifact: Path) -> None:
    with pytest.raises(CapacityError, match="token trees of 65 nodes"):
        answer(artifact, "abacus", "budget:64")


def test_an_artifact_for_it_alone_has_its_files_and_no_others(tmp_path: Path) -> None:
    opened = OpenedArtifact.at(compiled(tmp_path, (), ("abacus-7",), "pp2"))
    files = [file for file in opened.files.names() if file.startswith(layout.device_file("abacus", ""))]
    assert opened.manifest.targets == ("abacus-7",) and not opened.manifest.tools and not opened.digests
    assert not [file for file in opened.files.names() if file.startswith(("kernels/", "weights/"))]
    names = ["beads.json", *(f"{name}.safetensors" for name in ("llm", "llm.rank0", "llm.rank1", "ssm"))]
    assert sorted(files) == sorted(layout.device_file("abacus", name) for name in names)
    with pytest.raises(ArtifactError, match="flexspec compile llm --target abacus-13"):
        answer(opened.files.root, "abacus", "off")


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "x.fspec", "--device", "abacus"],
        ["generate", "x.fspec", "-p", "hello", "--device", "abacus"],
        ["compile", "llm", "-o", "x.fspec", "--target", "abacus-7"],
    ],
)
def test_the_commands_offer_it(words: list[str]) -> None:
    arguments = build_parser(words[0]).parse_args(words)
    assert words[-1] in (getattr(arguments, "device", None), *getattr(arguments, "target", []))


def test_help_names_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser("compile").parse_args(["compile", "--help"])
    assert "abacus-7, abacus-13" in " ".join(capsys.readouterr().out.split())
