"""The page that ``flexspec inspect`` shows: collects facts as plain data, and formats them as text.

A page is a dictionary of sections: a dictionary is shown as aligned lines, a list of dictionaries as a table.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flexspec.draft_plan import OPEN_BATCH
from flexspec.errors import ArtifactError
from flexspec.types import Role

if TYPE_CHECKING:
    from flexspec.compiler.artifact.model_record import PartRecord
    from flexspec.compiler.artifact.opened import OpenedArtifact
    from flexspec.compiler.frontends.loaded_model import LoadedModel
    from flexspec.graph import Graph
    from flexspec.models.config import ModelConfig

Page = dict[str, Any]


def artifact_page(artifact: OpenedArtifact) -> Page:
    """Everything that an artifact says about itself. Raises ArtifactError for missing or damaged parts."""
    manifest, record, plan = artifact.manifest, artifact.record, artifact.plan
    sizes = {name: entry.size_bytes for name, entry in sorted(manifest.files.items())}
    page: Page = {
        "artifact": {
            "path": artifact.name,
            "name": record.name,
            "source_hash": record.source_hash,
            "format_version": manifest.format_version,
            "flexspec_version": manifest.flexspec_version,
            "dtype": record.dtype,
            "weights": record.weight_format,
            "targets": list(manifest.targets),
            "tools": [f"{name}: {version}" for name, version in sorted(manifest.tools.items())],
            "rebuild": manifest.rebuild,
            "bytes": sum(sizes.values()),
        },
        "models": [_part_row(part) for part in record.models],
        "plan": {
            "origin": plan.origin,
            "stages": [
                f"blocks {s.first_block} to {s.end_block - 1} on ranks {', '.join(map(str, s.ranks))}"
                for s in plan.stages
            ],
            "ssm_ranks": [f"ssm{i + 1 if i else ''}: {list(ranks)}" for i, ranks in enumerate(plan.ssm_ranks)],
            "tree_ladder": [
                f"{draft} (any batch)" if batch >= OPEN_BATCH else f"{draft} (up to {batch} requests)"
                for batch, draft in plan.ladder.rungs
            ],
        },
        "self_tests": {name: sorted(isas) for name, isas in sorted(artifact.digests.items())},
        "gpu_kernels": _kernel_rows(artifact),
        "files": [{"file": name, "bytes": size} for name, size in sizes.items()],
    }
    return {name: section for name, section in page.items() if section}


def _part_row(part: PartRecord) -> dict[str, Any]:
    return {
        "model": part.name,
        "family": part.family,
        "layers": part.layers,
        "heads": part.heads,
        "kv_heads": part.kv_heads,
        "head_dim": part.head_dim,
        "vocab": part.vocab_size,
        "outputs": part.outputs,
        "context_tokens": part.max_positions,
        "parameters": part.parameters,
        "parameter_bytes": part.parameter_bytes,
        "canonical_hash": part.graph_hash[:16],
    }


def part_page(artifact: OpenedArtifact, name: str, graph: Graph) -> Page:
    """One model of an artifact, and its graph in the artifact. ``name`` is that of one of its graphs."""
    from flexspec.compiler.artifact import layout

    record = artifact.record
    part = next((part for part in record.models if part.name == name), None)
    if part is None:
        raise _odd(artifact, layout.MODELS, f"an entry for {name}")
    model = _part_row(part) | {"canonical_hash": part.graph_hash}  # in full
    return {"model": model, **graph_page(graph, "lowered")}


def _kernel_rows(artifact: OpenedArtifact) -> list[dict[str, Any]]:
    """The resource table of the packaged GPU kernels, one row per kernel; empty without GPU targets."""
    from flexspec.compiler.artifact import layout
    from flexspec.kernels.gpu.aot import Resources
    from flexspec.kernels.gpu.package import read_facts

    rows = []
    for variant in layout.gpu_variants(artifact.files.names()):
        for target, facts in sorted(read_facts(variant, artifact.files.read_bytes).items()):
            for entry, kernel in sorted(facts.tables("kernels").items()):
                file = artifact.files.file(layout.gpu_member(variant, kernel.text("file")))
                row = {"variant": variant, "target": target, "kernel": entry}
                row |= sorted(asdict(kernel.record("resources", Resources)).items())
                rows.append(row | {"binary_bytes": file.stat().st_size})
    return rows


def _odd(artifact: OpenedArtifact, file: str, expected: str) -> ArtifactError:
    return ArtifactError(f"{artifact.name}: {file} has an unknown form", expected, artifact.fix)


def model_page(model: LoadedModel, graph: Graph, form: str) -> Page:
    """A checkpoint and its graph; ``form`` as in graph_page."""
    config = model.config
    return {
        "model": {
            "name": model.name,
            "format": model.format,
            "architecture": model.architecture,
            "source_hash": model.source_hash,
            "family": config.family,
            "layers": config.layers,
            "hidden_size": config.hidden_size,
            "heads": f"{config.heads} ({config.kv_heads} kv heads of {config.head_dim})",
            "ffn_size": config.ffn_size,
            **_experts(config),
            "vocab_size": config.vocab_size,
            "context_tokens": config.max_positions,
            "rope": f"{config.rope.kind}, theta {config.rope.theta:g}",
            "tokenizer": "yes" if model.tokenizer_json else "no",
            "chat_template": "yes" if model.chat_template else "no",
        },
        **graph_page(graph, form),
    }


def _experts(config: ModelConfig) -> Page:
    if not config.experts:
        return {}
    dense = f", layers {', '.join(map(str, config.dense_layers))} dense" if config.dense_layers else ""
    return {
        "experts": f"{config.experts} of ffn_size {config.expert_ffn_size}, {config.experts_per_token} a token{dense}"
    }


def graph_page(graph: Graph, form: str) -> Page:
    """Size and operators of a graph. ``form``: canonical (as built), lowered (after the passes)..."""
    from flexspec.compiler.forms.draw import find_repeat

    weights = [value.type for value in graph.inputs_of(Role.WEIGHT)]
    known = [kind for kind in weights if all(isinstance(dim, int) for dim in kind.dims)]
    repeat = find_repeat(graph)
    return {
        "graph": {
            "name": graph.name,
            "form": form,
            "hash": graph.hash(),
            "inputs": ", ".join(f"{n} {role}" for role, n in Counter(v.type.role.value for v in graph.inputs).items()),
            "outputs": len(graph.outputs),
            "nodes": len(graph.nodes),
            "repeats": f"{repeat.count} x {repeat.period} nodes" if repeat.count > 1 else "nothing",
            "parameters": sum(kind.elements({}) for kind in known),
            "parameter_bytes": sum(kind.bytes({}) for kind in known),
        },
        "operators": [
            {"operator": op, "count": n} for op, n in sorted(Counter(node.op for node in graph.nodes).items())
        ],
    }


def show(page: Page) -> str:
    """The page as text: a heading for each section, then its lines."""
    blocks = []
    for title, section in page.items():
        lines = _table(section) if isinstance(section, list) else _fields(section)
        blocks.append("\n".join([title.replace("_", " "), *(f"  {line}".rstrip() for line in lines)]))
    return "\n\n".join(blocks) + "\n"


def _fields(section: dict[str, Any]) -> list[str]:
    width = max(len(key) for key in section) + 2
    lines = []
    for key, value in section.items():
        values = value if isinstance(value, list) else [value]
        name = key.replace("_", " ")
        lines += [f"{name if i == 0 else '':<{width}}{_cell(item)}" for i, item in enumerate(values or ["none"])]
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Aligned columns: numbers to the right, words to the left."""
    header = list(rows[0])
    cells = [header, *([_cell(row[key]) for key in header] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    numeric = [all(isinstance(row[key], int) for row in rows) for key in header]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        for line in cells
    ]


def _cell(value: Any) -> str:
    """A value as text, integers with separated thousands."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
