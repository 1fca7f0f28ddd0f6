"""``flexspec doctor``: what compile and serve would see on this machine, and what would stop them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

EPILOG = """\
example:
  flexspec doctor
  flexspec doctor --port 8000 --json
Exit code 0: nothing would stop compile or serve; 1: a line marked with ! would.
"""
PACKAGES = ("numpy", "tokenizers", "jinja2", "fastapi", "uvicorn", "torch", "triton")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    problem: str = ""  # why compile or serve would fail or be slow, with the fix
    fatal: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--host", default="127.0.0.1", help="address that serve would listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port that serve would listen on (default 8000)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    findings = list(examine(args.host, args.port))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{'!' if finding.fatal else ' '} {finding.name:12s} {finding.value}".rstrip())
            if finding.problem:
                print(f"  {'':12s} {finding.problem}")
    return int(any(finding.fatal for finding in findings))


def examine(host: str, port: int) -> Iterator[Finding]:
    """All findings, each from the code that compile and serve ask themselves."""
    yield Finding("flexspec", f"{_version('flexspec') or 'not installed'}, Python {platform.python_version()}")
    yield _instructions()
    yield from _cores()
    yield _memory()
    yield _compiler()
    yield _cache()
    yield _open_files()
    yield _port(host, port)
    yield Finding("GPUs", ", ".join(gpus()) or "none seen")
    versions = [f"{name} {_version(name) or '-'}" for name in PACKAGES]
    yield Finding("packages", ", ".join(versions))
    left = [f"{name}={os.environ[name]}" for name in _TORCHRUN if name in os.environ]
    if left:
        yield Finding(
            "environment", " ".join(left), "left by torchrun? serve takes itself for a rank: unset them", fatal=True
        )


def _instructions() -> Finding:
    from flexspec.errors import FlexspecError
    from flexspec.kernels.cpu.build import supported_isas

    try:
        names = supported_isas()
    except FlexspecError as error:
        return Finding("CPU", platform.machine(), str(error), fatal=True)
    others = f" (also runs {', '.join(names[1:])})" if names[1:] else ""
    return Finding("CPU", f"{platform.machine()}, programs for {names[0]}{others}")


def _cores() -> Iterator[Finding]:
    from flexspec.host.control_group import cpu_quota
    from flexspec.host.cores import usable_cores

    quota = cpu_quota()
    limit = "no quota" if quota is None else f"a quota of {quota:g}"
    yield Finding("cores", f"{usable_cores()} of {os.cpu_count()}, {limit}")


def _memory() -> Finding:
    from flexspec.runtime.open.host_memory import host_memory

    memory = host_memory()
    if memory is None:
        return Finding("memory", "unknown", "the kernel does not say; serve cannot check that its pool fits")
    return Finding(
        "memory", f"{memory.free_bytes / 1e9:.2f} GB free of {memory.total_bytes / 1e9:.2f} GB (limits counted)"
    )


def _compiler() -> Finding:
    from flexspec.errors import ToolchainError
    from flexspec.kernels.cpu.build import find_compiler

    try:
        return Finding("C++ compiler", find_compiler())
    except ToolchainError as error:
        return Finding("C++ compiler", "none", f"compile needs one, serve does not: {error}")


def _cache() -> Finding:
    from flexspec.errors import StorageError
    from flexspec.host.cache import cache_root, check_cache

    try:
        check_cache()
    except StorageError as error:
        return Finding("cache", "not usable", f"costs time only: {error}")
    return Finding("cache", f"{cache_root()}, writable")


def _open_files() -> Finding:
    from flexspec.host.open_files import open_file_limits, raise_open_files

    soft, hard = open_file_limits()
    return Finding("open files", f"{soft}, may be raised to {hard}", raise_open_files() or "")


def _port(host: str, port: int) -> Finding:
    from flexspec.errors import PortError
    from flexspec.runtime.server.listen import reserve_port

    try:
        with reserve_port(host, port):
            return Finding("port", f"{host}:{port} is free")
    except PortError as error:
        return Finding("port", f"{host}:{port} cannot be used", str(error), fatal=True)


def gpus(
    nvidia: Path = Path("/proc/driver/nvidia/gpus"), amd: Path = Path("/sys/class/kfd/kfd/topology/nodes")
) -> list[str]:
    """The GPUs that their drivers show, without loading a library."""
    found = []
    for path in sorted(nvidia.glob("*/information")):
        rows = [line.split(":", 1) for line in path.read_text(errors="replace").splitlines() if ":" in line]
        found.append(next((value.strip() for name, value in rows if name == "Model"), "NVIDIA GPU"))
    for path in sorted(amd.glob("*/properties")):
        rows = [line.split() for line in path.read_text(errors="replace").splitlines()]
        values = {row[0]: row[1] for row in rows if len(row) == 2}
        if values.get("simd_count", "0") != "0":
            found.append(f"AMD gfx {values.get('gfx_target_version', '?')}")
    return found


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    if name == "flexspec":
        return str(sys.modules["flexspec"].__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return None
