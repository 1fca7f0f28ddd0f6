"""The door for checkpoints: detects the format of a path and opens it with the right loader."""

from __future__ import annotations

from pathlib import Path

from flexspec.compiler.frontends.files import check_file, read_bytes
from flexspec.compiler.frontends.huggingface import open_huggingface
from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.compiler.frontends.weights import check_weights
from flexspec.errors import ModelFileError

__all__ = ["LoadedModel", "check_weights", "open_model"]

_EXPECTED = "a .gguf file or a Hugging Face folder"
_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive (perhaps a PyTorch pickle)"),
    (b"\x80\x02", "a Python pickle"),
    (b"GGML", "a file of the old GGML format"),
    (b"lmgg", "a file of the old GGML format"),
    (b"tjgg", "a file of the old GGML format"),
    (b"<!DO", "a web page"),
    (b"<htm", "a web page"),
)


def open_model(path: Path, expected: str = _EXPECTED) -> LoadedModel:
    """Open the GGUF file or Hugging Face folder ``path``; weights are read later, one tensor at a time.

    ``expected``: what the caller accepts, named in the error about anything else. Raises ModelFileError (missing,
    truncated, damaged, a pointer, another format), ModelConfigError (incomplete or unsupported), WeightError or
    TokenizerError; a bad file raises nothing else.
    """
    try:
        return _open(Path(path), expected)
    except OSError as error:  # a folder without permission, a failing disk
        raise ModelFileError(f"{path} cannot be read ({error})", expected, "check its permissions") from None


def _open(path: Path, expected: str) -> LoadedModel:
    if path.is_dir():
        return open_huggingface(path)
    size = check_file(path, expected)
    head = bytes(read_bytes(path, 0, min(size, 9)))
    if head[:4] == b"GGUF":
        from flexspec.compiler.frontends.gguf import open_gguf  # brings in the gguf package

        return open_gguf(path)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        fix = f"pass its folder, {path.parent}"
        raise ModelFileError(f"{path} is a single safetensors file", "the folder that also holds config.json", fix)
    for magic, name in _OTHER_FORMATS:
        if head.startswith(magic):
            raise ModelFileError(f"{path} is {name}", expected, "download or convert the model in one of these forms")
    raise ModelFileError(f"{path} has an unknown format", expected, "check the path, or download the file again")
