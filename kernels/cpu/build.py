"""Compiles generated C++ for one instruction set with the system's C++ compiler; results are cached by content.

The cache key hashes source, templates, flags and the compiler's version, so nothing stale is ever loaded. Needs g++ or
clang++ only here; running an artifact needs no compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from flexspec.errors import CompileError, StorageError, ToolchainError
from flexspec.host.cache import in_cache, temporary_cache, writable_cache
from flexspec.host.exits import describe_exit
from flexspec.host.files import write_file
from flexspec.ops.record import all_records

TEMPLATES = Path(__file__).resolve().parents[1] / "templates" / "cpu"

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
ABI = 3  # of programs, raised with any change of what launch.py calls in them
_COMMON = (
    f"-DFS_ABI={ABI}",
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
_MAX_MESSAGE_CHARS = 4000  # from the beginning: what follows a compiler's first error is often its echo
_PART_KILLED = re.compile(
    r"^.*(?:Killed signal terminated program|virtual memory exhausted|cc1plus: out of memory).*", re.M
)
_ERROR_PLACE = re.compile(r"^program\.cpp:(\d+):\d+: (?:fatal )?error:", re.M)
_NODE_COMMENT = re.compile(r"\s*// %.* = (\w+)\(")  # cpu/render.py writes a node's line above its calls


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
    """The templates a generated source includes, by path below their folder."""
    return {path.relative_to(TEMPLATES).as_posix(): path.read_bytes() for path in sorted(TEMPLATES.rglob("*.h"))}


def build_key(source: str, isa: str, compiler: str) -> str:
    """Digest of everything that the library's bytes depend on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    digest = hashlib.sha256()
    for part in (source, isa, " ".join(ISA_FLAGS[isa] + _COMMON), version):
        digest.update(part.encode() + b"\0")
    for name, text in header_files().items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()[:32]


def build_path(source: str, isa: str) -> Path:
    """The cached shared library of ``source`` for ``isa``, built if it is not there yet.

    Raises ToolchainError without a compiler, CompileError with the compiler's message.
    """
    compiler = find_compiler()
    name = f"{build_key(source, isa, compiler)}.so"
    cached = in_cache("cpu", name)
    if cached is not None:
        return cached
    with tempfile.TemporaryDirectory(prefix="flexspec-") as folder:
        work = Path(folder)
        (work / "program.cpp").write_text(source)
        # Relative names and a prefix map keep the folder out of the bytes: built twice, the library is the same.
        command = [compiler, *_COMMON, *ISA_FLAGS[isa], f"-ffile-prefix-map={TEMPLATES}=.", f"-I{TEMPLATES}"]
        command += ["-Wl,--build-id=none", "-o", "program.so", "program.cpp"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise _failure(compiler, isa, source, done)
        data = (work / "program.so").read_bytes()
    return _store(name, data)


def _store(name: str, data: bytes) -> Path:
    path = writable_cache("cpu") / name
    try:
        write_file(path, data)
    except StorageError as error:  # the cache is full
        path = temporary_cache("cpu", error) / name
        write_file(path, data)
    return path


def _failure(compiler: str, isa: str, source: str, done: subprocess.CompletedProcess[str]) -> CompileError:
    """Why there is no library: the compiler was killed, an operator's expression is wrong, or something else."""
    message = done.stderr.strip()[:_MAX_MESSAGE_CHARS] or "(it gave no message)"
    part = _PART_KILLED.search(done.stderr)  # the g++ that we start runs others, and outlives them
    if done.returncode < 0 or part:
        how = describe_exit(done.returncode) if done.returncode < 0 else f"stopped: {part[0] if part else ''}"
        return _killed(f"{compiler} was {how}, building for {isa}", done.returncode == -signal.SIGKILL or bool(part))
    operator = _operator_at_fault(source, done.stderr)
    if operator is not None:
        return CompileError(
            f"the expr of operator {operator} does not compile ({compiler}, {isa}):\n{message}\n",
            "a C++ expression over x0 and x1",
            f"correct it in the record of {operator}; KernelKey in flexspec/ops/record.py lists what it may use",
        )
    return CompileError(
        f"{compiler} failed for {isa} with {describe_exit(done.returncode)}:\n{message}\n",
        "generated C++ that compiles",
        "correct what you changed in kernels/templates/cpu, kernels/cpu/emitters or a weight format; if nothing, "
        "report this with the compiler version (a newer g++, 12 or later, may help)",
    )


def _killed(found: str, memory: bool) -> CompileError:
    if memory:
        fix = (
            "most likely the machine ran out of memory (`dmesg | grep -i oom` shows it): close other programs or add "
            "swap, and run the command again; what has been built is kept"
        )
    else:
        fix = "run the command again; if it is killed again, try another compiler (CXX=clang++)"
    return CompileError(found, "a compiler that finishes", fix)


def _operator_at_fault(source: str, stderr: str) -> str | None:
    """The operator whose call contains the first error, if its C++ comes from its record."""
    place = _ERROR_PLACE.search(stderr)
    if place is None:
        return None
    above = source.splitlines()[: int(place[1])]
    node = next((match for line in reversed(above) if (match := _NODE_COMMENT.match(line))), None)
    record = all_records().get(node[1]) if node else None
    return record.name if record is not None and record.kernel.expr is not None else None
