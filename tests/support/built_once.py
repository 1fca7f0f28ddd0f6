"""What tests build and only read, built once for all of them, by content: a stale one is never given."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

from flexspec.host.cache import cache_root
from flexspec.kernels.cpu.build import find_compiler
from repository import ROOT, SOURCE_FOLDERS


@functools.cache
def _surroundings() -> bytes:
    """Digest of all that may change what a build makes: sources, these helpers, packages, interpreter, compiler."""
    digest = hashlib.sha256(sys.version.encode())
    digest.update(subprocess.run([find_compiler(), "--version"], capture_output=True, check=True).stdout)
    for package in sorted(f"{each.name}=={each.version}" for each in distributions()):
        digest.update(package.encode() + b"\0")
    for folder in (*SOURCE_FOLDERS, "tests/support"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


def built_once(name: str, options: object, make: Callable[[Path], None]) -> Path:
    """A folder, for reading only, that ``make`` filled once for these ``options`` (their repr says all of them).

    It lies in flexspec's cache: for this run of tests, or from run to run where FLEXSPEC_CACHE is set. A second process
    that wants it waits for the first.
    """
    key = hashlib.sha256(_surroundings() + repr((name, options)).encode()).hexdigest()[:32]
    root = cache_root() / "tests"
    root.mkdir(parents=True, exist_ok=True)
    folder, partial = root / f"{name}-{key}", root / f"{name}-{key}.partial"
    with (root / f"{name}-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder
