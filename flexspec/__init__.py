"""flexspec: a compiler and server for tree-speculative decoding (SpecInfer, arXiv 2305.09781).

The names below are the Python face; each is imported on first use, so that ``import flexspec`` stays fast. The core
package beside it (layer 0: types, graph, operator records, builder, token tree, errors) imports nothing heavy; torch,
triton, torch_mlir and onnx are imported only by the files that use them.
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexspec.api.compile import compile
    from flexspec.api.llm import LLM
    from flexspec.api.plan import plan
    from flexspec.builder import GraphBuilder
    from flexspec.runtime.engine.complete import Completion
    from flexspec.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "GraphBuilder", "SamplingParams", "__version__", "compile", "plan"]

_FACE = {  # name -> the module that has it
    "Completion": "flexspec.runtime.engine.complete",
    "GraphBuilder": "flexspec.builder",
    "LLM": "flexspec.api.llm",
    "SamplingParams": "flexspec.sampling",
    "compile": "flexspec.api.compile",
    "plan": "flexspec.api.plan",
}

for _name in ("compiler", "kernels", "runtime"):
    if not (_Path(__file__).parent / _name).is_dir():  # a zip download or a checkout without symlink support
        raise ImportError(
            f"flexspec/{_name} must be a link to ../{_name}: check out with symbolic links enabled "
            "(git config core.symlinks true; git checkout -- flexspec)"
        )
del _name

if not TYPE_CHECKING:  # type checkers see the imports above, and misspelt names

    def __getattr__(name: str) -> object:
        if name not in _FACE:
            raise AttributeError(f"module 'flexspec' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_FACE[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
