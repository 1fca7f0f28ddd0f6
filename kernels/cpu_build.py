"""Compiles generated C++ for one instruction set with the system's C++ compiler; results are cached by content.

The cache key hashes source, templates, flags and the compiler's version, so nothing stale is ever loaded. Needs g++ or
clang++ only here; running an artifact needs no compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from flexspec.cache import cache_root
from flexspec.errors import CompileError, ToolchainError

TEMPLATES = Path(__file__).resolve().parent / "templates" / "cpu"

# From best to plainest. "amx" is AVX-512 plus AMX bf16 tiles; "generic" is the compiler's default for the machine.
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512"),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx2": ("-march=x86-64-v3",),
    "generic": (),
}
_NEEDS = {
    "amx": ("amx_tile", "amx_bf16", "avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx2": ("avx2", "fma", "bmi2"),
    "generic": (),
}
_COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-exceptions",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-Wno-psabi",
)


def target_isas() -> tuple[str, ...]:
    """Instruction sets worth building for on this kind of machine."""
    return ("amx", "avx512", "avx2") if platform.machine() in ("x86_64", "AMD64") else ("generic",)


def supported_isas() -> tuple[str, ...]:
    """Instruction sets this CPU runs, best first. FLEXSPEC_CPU_ISA narrows the choice to one (for tests)."""
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                break
    names = tuple(isa for isa, needs in _NEEDS.items() if flags.issuperset(needs))
    wanted = os.environ.get("FLEXSPEC_CPU_ISA")
    if wanted and wanted not in names:
        raise CompileError(
            f"FLEXSPEC_CPU_ISA={wanted}", f"one of {', '.join(names)} on this CPU", "unset it or name a supported one"
        )
    return (wanted,) if wanted else names


def find_compiler() -> str:
    """The C++ compiler: $CXX, g++ or clang++. Raises ToolchainError when there is none."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        if shutil.which(name):
            return name
    raise ToolchainError("no C++ compiler on PATH", "g++ or clang++", "install one (apt-get install g++) or set CXX")


def header_files() -> dict[str, bytes]:
    """The templates a generated source includes, by file name."""
    return {path.name: path.read_bytes() for path in sorted(TEMPLATES.glob("*.h"))}


def build_key(source: str, isa: str, compiler: str) -> str:
    """Digest of all that the library's bytes depend on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    digest = hashlib.sha256()
    for part in (source, isa, " ".join(ISA_FLAGS[isa] + _COMMON), version):
        digest.update(part.encode() + b"\0")
    for name, text in header_files().items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()[:32]


def build_path(source: str, isa: str) -> Path:
    """The cached shared library of ``source`` for ``isa``, built if it is not there yet.

    Raises ToolchainError without a compiler, CompileError in the compiler's words.
    """
    compiler = find_compiler()
    cached = cache_root() / "cpu" / f"{build_key(source, isa, compiler)}.so"
    if cached.exists():
        return cached
    with tempfile.TemporaryDirectory(prefix="flexspec-") as folder:
        work = Path(folder)
        (work / "program.cpp").write_text(source)
        # Relative names and a prefix map keep the folder out of the bytes: built twice, the library is the same.
        command = [compiler, *_COMMON, *ISA_FLAGS[isa], f"-ffile-prefix-map={TEMPLATES}=.", f"-I{TEMPLATES}"]
        command += ["-Wl,--build-id=none", "-o", "program.so", "program.cpp"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(
                f"{compiler} failed for {isa}:\n{done.stderr[-4000:]}",
                "generated C++ that compiles",
                "report this with the compiler version; a newer g++ (12 or later) may help",
            )
        data = (work / "program.so").read_bytes()
    cached.parent.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(f".{os.getpid()}.tmp")
    partial.write_bytes(data)
    partial.replace(cached)
    return cached
