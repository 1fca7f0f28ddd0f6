"""Where everything lies in an artifact: the name of each member is spelled in this file and nowhere else.

``name`` is a graph's name in the artifact: a model (llm, ssm, ssm2...) or a rank's part of the LLM (llm.rankN).
"""

from __future__ import annotations

from collections.abc import Iterable

MANIFEST = "manifest.json"  # digests of all other members (artifact/manifest.py)
MODELS = "model.json"  # the models in order (artifact/model_record.py)
PLAN = "plan.json"  # stages, ranks, draft plans (artifact/plan.py)
RANKS = "ranks.json"  # one record a rank, in plans of several (artifact/rank_record.py)
CHECKS = "checks.json"  # digests of the self-tests: graph name -> instruction set -> sha256
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
SUFFIX = ".fspec"  # of an artifact itself

_GRAPHS, _GRAPH_END = "graph/", ".fsg"
_KERNELS = "kernels/"
_KERNEL_FACTS = "/meta.json"
_CPU_TARGET = "cpu-"


def rank_name(rank: int) -> str:
    """The name of a rank's part of the LLM."""
    return f"llm.rank{rank}"


def graph_file(name: str) -> str:
    """The lowered graph as text."""
    return f"{_GRAPHS}{name}{_GRAPH_END}"


def graph_names(members: Iterable[str]) -> list[str]:
    """Names of the graphs among ``members``, in their order."""
    graphs = (member for member in members if member.startswith(_GRAPHS) and member.endswith(_GRAPH_END))
    return [member.removeprefix(_GRAPHS).removesuffix(_GRAPH_END) for member in graphs]


def drafter_table(drafter: str) -> str:
    """The table of a drafter that needs one (flexspec/drafters/record.py); an SSM folder uses the same name."""
    return f"{drafter}.safetensors"


def packed_weights(name: str) -> str:
    """Weights in the tiles that the CPU programs read."""
    return f"weights/{name}.safetensors"


def canonical_weights(name: str) -> str:
    """Weights as the graph names them, for GPUs."""
    return f"weights/{name}.canonical.safetensors"


def cpu_source(name: str) -> str:
    """The generated C++ program."""
    return f"{_KERNELS}cpu/{name}/program.cpp"


def cpu_library(name: str, isa: str) -> str:
    """The program, built for one instruction set."""
    return f"{_KERNELS}cpu/{name}/{isa}.so"


def cpu_header(file: str) -> str:
    """A template that the programs include."""
    return f"{_KERNELS}cpu/include/{file}"


def cpu_target(isa: str) -> str:
    """The name of an instruction set among the manifest's targets."""
    return f"{_CPU_TARGET}{isa}"


def isa_of(target: str) -> str:
    """The instruction set of such a target."""
    return target.removeprefix(_CPU_TARGET)


def device_file(device: str, file: str) -> str:
    """A file for one device other than CPUs and GPUs, whose files have functions of their own."""
    return f"devices/{device}/{file}"


def gpu_member(variant: str, file: str) -> str:
    """A file of the kernels of one variant."""
    return f"{_KERNELS}{variant}/{file}"


def gpu_kernel_facts(variant: str) -> str:
    """The kernels of a variant: files, hashes, launch facts and resources of each target."""
    return f"{_KERNELS}{variant}{_KERNEL_FACTS}"


def gpu_variants(members: Iterable[str]) -> list[str]:
    """Names of the variants that have kernels among ``members``, in their order."""
    facts = (member for member in members if member.startswith(_KERNELS) and member.endswith(_KERNEL_FACTS))
    return [member.removeprefix(_KERNELS).removesuffix(_KERNEL_FACTS) for member in facts]
