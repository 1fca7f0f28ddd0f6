"""The table of contents of the passes, and their runner: it verifies after each and dumps the graphs on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flexspec.compiler.passes.attention_modes import attention_modes
from flexspec.compiler.passes.dead_values import dead_values
from flexspec.compiler.passes.fuse_projections import fuse_projections
from flexspec.compiler.passes.fuse_residual import fuse_residual
from flexspec.compiler.passes.fuse_swiglu import fuse_swiglu
from flexspec.errors import GraphError, PassError
from flexspec.graph import Graph
from flexspec.text import print_graph
from flexspec.verifier import verify


@dataclass(frozen=True, slots=True)
class Pass:
    """A named rewrite of a graph."""

    name: str
    run: Callable[[Graph], Graph]


_FUSION = (
    Pass("dead_values", dead_values),
    Pass("fuse_swiglu", fuse_swiglu),  # before fuse_projections, which would group gate and up
    Pass("fuse_projections", fuse_projections),
    Pass("fuse_residual", fuse_residual),
)

LLM_PASSES = (Pass("attention_modes", partial(attention_modes, mode="tree_verify")), *_FUSION)
SSM_PASSES = (Pass("attention_modes", partial(attention_modes, mode="incremental")), *_FUSION)


def run_passes(graph: Graph, passes: Sequence[Pass], dump_dir: Path | None = None) -> Graph:
    """The graph after all passes, verified before the first and after each.

    With ``dump_dir``, the text after pass n is written to ``NN_pass.fsg`` there (00_input first), even if that pass
    broke the graph. Raises GraphError for an invalid input graph, and PassError naming the pass that broke it.
    """
    _dump(graph, dump_dir, 0, "input")
    verify(graph)
    for number, step in enumerate(passes, 1):
        graph = step.run(graph)
        _dump(graph, dump_dir, number, step.name)
        try:
            verify(graph)
        except GraphError as error:
            raise PassError(
                f"pass {step.name} (number {number}) broke the graph: {error.found}",
                error.expected,
                f"this is a bug in the pass: please report it with the --dump-ir output; {error.fix}",
            ) from error
    return graph


def _dump(graph: Graph, dump_dir: Path | None, number: int, name: str) -> None:
    if dump_dir is not None:
        dump_dir.mkdir(parents=True, exist_ok=True)
        (dump_dir / f"{number:02d}_{name}.fsg").write_text(print_graph(graph), encoding="utf-8")
