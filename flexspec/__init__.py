"""flexspec: a compiler and server for tree-speculative decoding (SpecInfer, arXiv 2305.09781).

Core package (layer 0): types, graph, operator records, builder, token tree, errors. It imports nothing heavy; torch,
triton, torch_mlir and onnx are imported only by the files that use them.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

for _name in ("compiler", "kernels", "runtime"):
    if not (_Path(__file__).parent / _name).is_dir():  # a zip download or a checkout without symlink support
        raise ImportError(
            f"flexspec/{_name} must be a link to ../{_name}: check out with symbolic links enabled "
            "(git config core.symlinks true; git checkout -- flexspec)"
        )
del _name
