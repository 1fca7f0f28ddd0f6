"""Render the template of a kernel family to Triton source text, and import such a text as a module.

Neither Triton nor torch is imported by rendering. Templates are in templates/triton.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flexspec.host.files import write_file
from flexspec.kernels.gpu.family import Config, Variant, family_of

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parents[1] / "templates" / "triton"


def render(variant: Variant, config: Config) -> str:
    """The source of one variant: a Triton module with the kernels of its family. A pure function."""
    family = family_of(variant.family)
    text = _environment().get_template(family.template).render(family.values(variant, config), v=variant, c=config)
    return text if text.endswith("\n") else text + "\n"


def source_key(source: str) -> str:
    """Short content hash of a source text, used in file names."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def import_source(source: str, folder: Path | None = None) -> ModuleType:
    """Import a rendered source and return the module; the same text is imported once.

    Triton reads the text of a kernel through ``inspect``, so it has to lie in a file: ``folder`` (default: a private
    folder of this user under the temporary directory), named by the text's hash.
    """
    name = f"flexspec_triton_{source_key(source)}"
    if name in sys.modules:
        return sys.modules[name]
    folder = folder or _private_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{name}.py"
    if not path.exists() or path.read_text() != source:
        write_file(path, source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


@lru_cache(maxsize=1)
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="flexspec-triton-"))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        line_statement_prefix="#%",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Python source, not markup
    )
