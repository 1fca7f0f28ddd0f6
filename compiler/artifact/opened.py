"""An opened artifact: every table is read and checked once, then shared by all who need it.

Serving in one process, each of several ranks, measuring and inspecting all read from here. Graphs and weights are read
on demand. ``layout.py`` names the files, ``open.py`` reads their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexspec.checked_table import Table
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import Manifest, damaged
from flexspec.compiler.artifact.model_record import LLM, ModelRecord, PartRecord, record_from_json
from flexspec.compiler.artifact.open import Artifact, open_artifact
from flexspec.compiler.artifact.plan import Plan, plan_from_json
from flexspec.compiler.artifact.rank_record import RankRecord, ranks_from_json
from flexspec.compiler.artifact.tensor_file import AnyArray
from flexspec.errors import ArtifactError
from flexspec.graph import Graph
from flexspec.step_sizes import step_sizes
from flexspec.text import parse_graph
from flexspec.types import Role
from flexspec.verifier import verify

Place = tuple[str, str]  # file, tensor


@dataclass(frozen=True, slots=True)
class OpenedArtifact:
    """The checked contents of an artifact. A ``name`` is that of a model, or ``layout.rank_name`` of a rank's part."""

    files: Artifact
    record: ModelRecord
    plan: Plan
    ranks: tuple[RankRecord, ...]  # in order; empty in a plan of one rank
    digests: Mapping[str, Mapping[str, str]]  # name -> instruction set -> sha256 of the self-test
    _graphs: dict[str, Graph] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, path: Path, *, check_digests: bool = True) -> OpenedArtifact:
        """Open the artifact at ``path``. Raises ArtifactError naming the file and the command that rebuilds it."""
        return cls.of(open_artifact(path, check_digests=check_digests))

    @classmethod
    def of(cls, files: Artifact) -> OpenedArtifact:
        """Read the tables of an artifact. Raises ArtifactError if one is missing or malformed."""
        several = layout.RANKS in files.names()
        return cls(
            files,
            record_from_json(files.read_json(layout.MODELS)),
            plan_from_json(files.read_json(layout.PLAN), layout.PLAN),
            ranks_from_json(files.read_json(layout.RANKS)) if several else (),
            _digests_from_json(files.read_json(layout.CHECKS)),
        )

    @property
    def name(self) -> str:
        """The file's or folder's name, for messages."""
        return self.files.root.name

    @property
    def manifest(self) -> Manifest:
        return self.files.manifest

    @property
    def fix(self) -> str:
        """The fix that every error about this artifact names."""
        return f"rebuild it: {self.manifest.rebuild}"

    @property
    def llm(self) -> PartRecord:
        return self.record.models[0]

    def graph_names(self) -> list[str]:
        """Names of all graphs: those of the models, then those of ranks' parts."""
        return layout.graph_names(self.files.names())

    def graph(self, name: str) -> Graph:
        """The lowered graph, parsed and verified. Raises ArtifactError, GraphTextError or GraphError."""
        if name not in self._graphs:
            file = layout.graph_file(name)
            try:
                text = self.files.read_bytes(file).decode()
            except UnicodeDecodeError as error:
                raise ArtifactError(
                    f"{self.name}: {file} is not UTF-8 ({error})", "a graph as text", self.fix
                ) from None
            graph = parse_graph(text)
            verify(graph)
            self._check_sizes(name, graph)
            self._graphs[name] = graph
        return self._graphs[name]

    def library(self, name: str, isa: str) -> Path:
        """The CPU program, built for ``isa``. Raises ArtifactError if the artifact has none."""
        return self.files.file(layout.cpu_library(name, isa))

    def digest(self, name: str, isa: str) -> str | None:
        """The digest of the program's self-test; None if the compiling machine could not run ``isa``."""
        return self.digests.get(name, {}).get(isa)

    def packed_weights(self, name: str) -> list[AnyArray]:
        """The arrays of the CPU program's weight table, in its order. Raises ArtifactError if one is missing."""
        part = self._rank(name)
        if part is not None:
            file = layout.packed_weights(name)
            return self._tensors(name, [(file, tensor) for tensor in part.weights])
        return self._tensors(name, self._model(name).weights)

    def canonical_weights(self, name: str) -> dict[str, AnyArray]:
        """The weights of a graph by their names in it, in its dtypes. Raises ArtifactError if one is missing."""
        if self._rank(name) is not None:
            file = layout.canonical_weights(name)
            places = {value.name: (file, value.name) for value in self.graph(name).inputs_of(Role.WEIGHT)}
        elif self.record.gpu is not None:
            places = dict(self.record.gpu.weights[self._model(name).name])
        else:
            raise ArtifactError(f"{self.name} has no weights for GPUs", "weights of every model", self.fix)
        return dict(zip(places, self._tensors(name, places.values()), strict=True))

    def _tensors(self, name: str, places: Iterable[Place]) -> list[AnyArray]:
        """One array per place; a model may use another model's file."""
        wanted = list(places)
        files = {file: self.files.tensors(file) for file in dict.fromkeys(file for file, _ in wanted)}
        missing = next((tensor for file, tensor in wanted if tensor not in files[file]), None)
        if missing is not None:
            raise ArtifactError(f"{self.name}: no tensor {missing} for {name}", "every weight of its program", self.fix)
        return [files[file][tensor] for file, tensor in wanted]

    def _check_sizes(self, name: str, graph: Graph) -> None:
        """Check that a model's record agrees with its graph, since drafters and pools are sized by the record."""
        part = next((part for part in self.record.models if part.name == name), None)
        if part is None:
            return
        sizes = step_sizes(graph)
        actual = (sizes.outputs, sizes.id_rows, sizes.feature_columns, sizes.reads_features)
        recorded = (part.outputs, part.vocab_size, part.feature_columns, part.reads_features)
        if actual != recorded or part.max_positions > sizes.max_positions:
            raise ArtifactError(f"{layout.MODELS} and the graph of {name} differ in sizes", f"{sizes}", self.fix)

    def _rank(self, name: str) -> RankRecord | None:
        return next((record for record in self.ranks if layout.rank_name(record.rank) == name), None)

    def _model(self, name: str) -> PartRecord:
        part = next((part for part in self.record.models if part.name == name), None)
        if part is None:
            raise ArtifactError(f"{self.name}: {layout.MODELS} has no model {name}", f"{LLM}, ssm...", self.fix)
        return part


def _digests_from_json(body: object) -> dict[str, dict[str, str]]:
    table = Table.of(body, layout.CHECKS, damaged)
    programs = {name: table.table(name) for name in table.names()}
    return {name: {isa: part.text(isa) for isa in part.names()} for name, part in programs.items()}
