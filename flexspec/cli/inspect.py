"""``flexspec inspect X``: the contents of an artifact, a model or a graph file, and its graphs in four forms."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flexspec.errors import ArtifactError, CompileError, ModelFileError

if TYPE_CHECKING:
    from flexspec.compiler.artifact.opened import OpenedArtifact
    from flexspec.compiler.frontends.loaded_model import LoadedModel
    from flexspec.compiler.passes.pipeline import Pass
    from flexspec.graph import Graph

EPILOG = """\
X is an artifact (a folder or a file), a .gguf file, a Hugging Face folder, or a graph as text or MLIR.

example:
  flexspec inspect build/smollm2.fspec
  flexspec inspect build/smollm2.fspec --model ssm
  flexspec inspect build/models/SmolLM2-135M-Instruct.Q4_1.gguf --emit=dot | dot -Tsvg > model.svg
(`make demo` puts the model and the artifact there)
"""

INSPECTED = "an artifact (folder or file), a .gguf file, a Hugging Face folder, or a graph as text or MLIR"
EMITTED = ("text", "mlir", "json", "dot")
_HEAD_BYTES = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flexspec.cli.options.dtype import add_dtype_options

    parser.epilog = EPILOG
    parser.add_argument("what", type=Path, metavar="X", help="an artifact, a model or a graph file")
    parser.add_argument("--emit", choices=EMITTED, help="print a graph in this form instead of the page")
    parser.add_argument(
        "--model",
        help="the model of an artifact to show: llm, ssm, ssm2 (default: a page of all, or with --emit the graph of "
        "llm); for other inputs, the model whose passes --lowered runs",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--canonical", action="store_true", help="show the graph as built (default for a model)")
    form.add_argument("--lowered", action="store_true", help="show the graph after all passes (as in an artifact)")
    add_dtype_options(parser, default=None)
    parser.add_argument("--partition", type=Path, metavar="PLAN.json", help="cut a model by a plan and show its ranks")
    parser.add_argument("--rank", type=int, help="with --partition: show this rank, or its graph with --emit")
    parser.add_argument("--json", action="store_true", help="print the page as JSON")


def run(args: argparse.Namespace) -> int:
    if args.json and args.emit:
        raise CompileError("--json and --emit together", "one of them", "use --emit=json for the graph")
    if args.rank is not None and args.partition is None:
        raise CompileError(f"--rank {args.rank} without a plan", "--partition PLAN.json", "pass the plan")
    if args.partition is not None:
        sys.stdout.write(_parts(args))
    else:
        sys.stdout.write(_emit(_graph(args), args.emit) if args.emit else _page(args))
    return 0


def _parts(args: argparse.Namespace) -> str:
    from flexspec.cli.inspection import parts as ranks
    from flexspec.cli.inspection.page import show
    from flexspec.compiler.planner.plan_file import read_plan
    from flexspec.draft_plan import DraftPlan

    if is_artifact(args.what):
        raise ArtifactError(
            f"--partition of {args.what.name}", "a model or its graph as built", "inspect the model file"
        )
    if args.emit and args.rank is None:
        raise CompileError("--emit of all ranks", "one graph", "choose a rank with --rank")
    graph = _read_graph(args.what) if is_graph(args.what) else _canonical(_open_model(args.what), args)
    plan = read_plan(args.partition, 0, DraftPlan("off"))
    parts = ranks.cut_parts(graph, plan, _passes(args) if args.lowered else None)
    if args.rank is None:
        page = ranks.parts_page(parts, plan)
    else:
        part = ranks.part_of(parts, args.rank)
        if args.emit:
            return _emit(part.graph, args.emit)
        page = ranks.rank_page(part, plan, "lowered" if args.lowered else "canonical")
    return json.dumps(page, indent=1) + "\n" if args.json else show(page)


def _emit(graph: Graph, form: str) -> str:
    if form == "mlir":
        from flexspec.compiler.forms.mlir import to_mlir

        return to_mlir(graph)
    if form == "dot":
        from flexspec.compiler.forms.draw import to_dot

        return to_dot(graph)
    if form == "json":
        from flexspec.compiler.forms.graph_json import graph_json

        return graph_json(graph)
    from flexspec.text import print_graph

    return print_graph(graph)


def _page(args: argparse.Namespace) -> str:
    from flexspec.cli.inspection import page as pages

    form = "lowered" if args.lowered else "canonical"
    if is_artifact(args.what):
        artifact = _open(args.what)
        if args.model or args.canonical or args.dtype or args.weights:
            page = pages.part_page(artifact, args.model or "llm", _artifact_graph(artifact, args))
        else:
            page = pages.artifact_page(artifact)
    elif is_graph(args.what):
        page = pages.graph_page(_graph(args), form if args.lowered else "as written")
    else:
        model = _open_model(args.what)
        page = pages.model_page(model, _lower(_canonical(model, args), args), form)
    return json.dumps(page, indent=1) + "\n" if args.json else pages.show(page)


def _graph(args: argparse.Namespace) -> Graph:
    """The requested graph. Raises the errors of the readers."""
    if is_artifact(args.what):
        return _artifact_graph(_open(args.what), args)
    if is_graph(args.what):
        for option, value in (("--dtype", args.dtype), ("--weights", args.weights)):
            if value:
                raise CompileError(f"{option} {value} for a graph", "the types in its text", f"leave out {option}")
        return _lower(_read_graph(args.what), args)
    return _lower(_canonical(_open_model(args.what), args), args)


def _artifact_graph(artifact: OpenedArtifact, args: argparse.Namespace) -> Graph:
    refused = (
        ("--canonical", args.canonical),
        (f"--dtype {args.dtype}", args.dtype),
        (f"--weights {args.weights}", args.weights),
    )
    for option, passed in refused:
        if passed:
            raise ArtifactError(
                f"{option} for {artifact.name}",
                "an artifact's graphs as compiled, lowered",
                "inspect the model file instead",
            )
    name = args.model or "llm"
    known = artifact.graph_names()
    if name not in known:
        raise ArtifactError(f"--model {name}", f"one of {', '.join(known)}", "choose a model of the artifact")
    return artifact.graph(name)


def _open_model(path: Path) -> LoadedModel:
    from flexspec.compiler.artifact import layout
    from flexspec.compiler.frontends.open_model import open_model

    if path.is_dir() and not (path / "config.json").exists():
        raise ModelFileError(
            f"{path} is a folder without {layout.MANIFEST} or config.json", INSPECTED, "check the path"
        )
    return open_model(path, INSPECTED)


def _canonical(model: LoadedModel, args: argparse.Namespace) -> Graph:
    from flexspec.api.arguments import read_dtype, read_weights
    from flexspec.cli.options.dtype import DEFAULT_DTYPE
    from flexspec.models.registry import build_model
    from flexspec.retype import store_weights

    graph = build_model(model.config, read_dtype(args.dtype or DEFAULT_DTYPE), **model.build_options)
    weights = read_weights(args.weights)
    return graph if weights is None else store_weights(graph, weights)


def _lower(graph: Graph, args: argparse.Namespace) -> Graph:
    """The graph, after the passes of ``--model`` if they are requested."""
    from flexspec.compiler.passes.pipeline import run_passes

    passes = _passes(args)
    return run_passes(graph, passes) if args.lowered else graph


def _passes(args: argparse.Namespace) -> tuple[Pass, ...]:
    """The passes of ``--model``. Raises CompileError unless it names a model."""
    from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES

    name = args.model or "llm"
    if not re.fullmatch(r"llm|ssm\d*", name):
        raise CompileError(f"--model {name}", "llm, ssm, ssm2, ...", "choose one of these")
    return LLM_PASSES if name == "llm" else SSM_PASSES


def _open(path: Path) -> OpenedArtifact:
    from flexspec.compiler.artifact.opened import OpenedArtifact

    return OpenedArtifact.at(path)


def is_artifact(path: Path) -> bool:
    """Whether a path is a folder or a zip file with a manifest, or is named .fspec."""
    import zipfile

    from flexspec.compiler.artifact import layout

    if path.suffix == layout.SUFFIX or (path / layout.MANIFEST).is_file():
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            return layout.MANIFEST in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def is_graph(path: Path) -> bool:
    """Whether a path is a text file that begins like a graph or an MLIR module."""
    return _first_word(path) in ("graph", "module", "func.func")


def _first_word(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = (line.split() for line in head.splitlines())
    return next((words[0] for words in lines if words and not words[0].startswith(("#", "//"))), "")


def _read_graph(path: Path) -> Graph:
    from flexspec.text import parse_graph
    from flexspec.verifier import verify

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: {error}", "a graph as UTF-8 text", "check the file") from None
    if _first_word(path) != "graph":
        from flexspec.compiler.forms.mlir import from_mlir

        return from_mlir(text)
    graph = parse_graph(text)
    verify(graph)
    return graph
