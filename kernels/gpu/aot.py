"""Compile generated kernels ahead of time for given GPUs, on a machine that needs none.

Owns the compile jobs, their cache and the budget check (no spills, shared memory within the device's limit). The
compiler itself runs in gpu/worker.py; what is compiled is rendered by gpu/render.py.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexspec.errors import CompileError, ToolchainError
from flexspec.host.cache import writable_cache
from flexspec.host.cores import usable_cores
from flexspec.host.exits import describe_exit
from flexspec.kernels.gpu.family import Config, Variant, family_of
from flexspec.kernels.gpu.render import render, source_key
from flexspec.kernels.gpu.targets import Target, target_of

_CACHE_FORMAT = 1
_WORKER = ["-m", "flexspec.kernels.gpu.worker"]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread (registers, spills) and one block (shared memory) of a kernel take."""

    registers: int
    spill_bytes: int
    shared_bytes: int

    def fits(self, target: Target) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes <= target.shared_limit_bytes


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One entry point. ``meta`` holds symbol, params ([name, type] in call order), warps and scratch sizes."""

    binary: bytes
    meta: dict[str, Any]
    resources: Resources


@dataclass(frozen=True, slots=True)
class CompiledVariant:
    """A variant compiled for a target, under the configuration that fits its budget."""

    variant: Variant
    config: Config
    target: Target
    triton_version: str
    source: str
    kernels: dict[str, CompiledKernel]  # by entry, in the order of the family's entries

    def fits(self) -> bool:
        return all(kernel.resources.fits(self.target) for kernel in self.kernels.values())


@dataclass(frozen=True, slots=True)
class _CompileJob:
    """One compilation: a variant under one configuration for one target."""

    variant: Variant
    config: Config
    target: Target
    source: str

    def request(self) -> dict[str, Any]:
        """The worker's job record, and with the versions the cache key."""
        entries = [
            {
                "name": entry.name,
                "params": entry.signature(self.variant.dtype),
                "warps": self.config.warps,
                "stages": self.config.stages if entry.stages is None else entry.stages,
            }
            for entry in family_of(self.variant.family).entries(self.variant)
        ]
        return {"target": self.target.name, "entries": entries}


def compile_variant(
    variant: Variant, target: str, *, config: Config | None = None, cache_dir: Path | None = None
) -> CompiledVariant:
    """Compile one variant for one target; ``config`` None takes the first candidate inside the budget.

    With a given ``config`` the result may exceed the budget: ask ``fits()``. Raises CompileError (with the resource
    table when every candidate is over budget) and ToolchainError when Triton is not installed.
    """
    if config is None:
        return compile_variants([variant], [target], cache_dir=cache_dir)[0]
    job = _CompileJob(variant, config, target_of(target), render(variant, config))
    result = _compile_all([job], cache_dir or writable_cache("triton"), None)[0]
    if isinstance(result, str):
        raise _failure(variant, job.target, f"{config.name}: {result}")
    return result


def compile_variants(
    variants: Sequence[Variant],
    targets: Sequence[str],
    *,
    cache_dir: Path | None = None,
    progress: Report | None = None,
) -> tuple[CompiledVariant, ...]:
    """Every variant for every target (variants outer), each under its first configuration inside the budget.

    Raises CompileError with a table of everything tried when nothing fits.
    """
    folder = cache_dir or writable_cache("triton")
    pairs = [(variant, target_of(name)) for variant in dict.fromkeys(variants) for name in dict.fromkeys(targets)]
    queues = {pair: iter(family_of(pair[0].family).configs(*pair)) for pair in pairs}
    tried: dict[tuple[Variant, Target], list[str]] = {pair: [] for pair in pairs}
    done: dict[tuple[Variant, Target], CompiledVariant] = {}
    while len(done) < len(pairs):  # one round = the next candidate of every pair that has none yet, in one worker
        jobs = [_next_job(pair, queues[pair], tried[pair]) for pair in pairs if pair not in done]
        for job, result in zip(jobs, _compile_all(jobs, folder, progress), strict=True):
            pair = (job.variant, job.target)
            if isinstance(result, CompiledVariant) and result.fits():
                done[pair] = result
            else:
                tried[pair].append(f"{job.config.name}: {result if isinstance(result, str) else _row_text(result)}")
    return tuple(done[pair] for pair in pairs)


def resource_rows(compiled: Sequence[CompiledVariant]) -> list[dict[str, str | int]]:
    """One row per kernel of the table that ``compile`` prints and the artifact stores."""
    return [
        {
            "variant": result.variant.name,
            "target": result.target.name,
            "kernel": kernel.meta["entry"],
            "config": result.config.name,
            **asdict(kernel.resources),
            "shared_limit_bytes": result.target.shared_limit_bytes,
            "binary_bytes": len(kernel.binary),
        }
        for result in compiled
        for kernel in result.kernels.values()
    ]


def triton_version() -> str:
    """Version of the installed Triton, without importing it. Raises ToolchainError."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise ToolchainError("Triton is not installed", "triton >= 3.6", "pip install triton") from None


def _next_job(pair: tuple[Variant, Target], queue: Iterator[Config], tried: list[str]) -> _CompileJob:
    variant, target = pair
    config = next(queue, None)
    if config is None:
        raise _failure(variant, target, "\n  " + "\n  ".join(tried))
    return _CompileJob(variant, config, target, render(variant, config))


def _failure(variant: Variant, target: Target, table: str) -> CompileError:
    return CompileError(
        f"{variant.name} for {target.name} failed under every configuration: {table}\n",
        f"no spills and at most {target.shared_limit_bytes} bytes of shared memory",
        "use a smaller --max-tree, or another Triton version",
    )


def _row_text(compiled: CompiledVariant) -> str:
    uses = [(kernel.meta["entry"], kernel.resources) for kernel in compiled.kernels.values()]
    return "; ".join(
        f"{entry} {use.registers} registers, {use.spill_bytes} bytes spilled, {use.shared_bytes} bytes shared"
        for entry, use in uses
    )


def _compile_all(jobs: Sequence[_CompileJob], cache: Path, progress: Report | None) -> list[CompiledVariant | str]:
    """Results in job order: compiled, or the compiler's error text."""
    version = triton_version()
    keys = [_cache_key(job, version) for job in jobs]
    missing = {key: job for key, job in zip(keys, jobs, strict=True) if not (cache / key / "result.json").is_file()}
    errors = _run_workers(missing, cache, progress)
    return [
        errors[key] if key in errors else _read_cached(cache / key, job, version)
        for key, job in zip(keys, jobs, strict=True)
    ]


def _run_workers(jobs: dict[str, _CompileJob], cache: Path, progress: Report | None) -> dict[str, str]:
    """Spread ``jobs`` over one process per two cores; returns the errors by key."""
    count = min(len(jobs), max(1, usable_cores() // 2))
    shares = [dict(list(jobs.items())[i::count]) for i in range(count)]
    errors: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, count)) as pool:
        for failed in pool.map(lambda share: _run_worker(share, cache, progress), shares):
            errors |= failed
    return errors


def _cache_key(job: _CompileJob, version: str) -> str:
    settings = {name: value for name, value in _worker_environment().items() if name.startswith("TRITON_")}
    record = [_CACHE_FORMAT, version, settings, job.source, job.request()]
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _worker_environment() -> dict[str, str]:
    """The caller's environment, compiling instead of interpreting, and without line tables.

    Line tables would put the path of the source file into the binary.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).absolute().parents[3])  # the folder that holds the package, also when not installed
    paths = [*filter(None, [environment.get("PYTHONPATH")]), root]
    return environment | {"TRITON_DISABLE_LINE_INFO": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _run_worker(jobs: dict[str, _CompileJob], cache: Path, progress: Report | None) -> dict[str, str]:
    """Compile ``jobs`` (by cache key) into the cache; returns the errors by key."""
    cache.mkdir(parents=True, exist_ok=True)
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=cache, prefix=".work-") as work_name:
        work = Path(work_name)
        lines = []
        for key, job in jobs.items():
            path = work / f"kernel_{source_key(job.source)}.py"
            path.write_text(job.source)
            lines.append(json.dumps({"id": key, "source_path": str(path), **job.request()}))
        (work / "jobs").write_text("\n".join(lines) + "\n")
        environment = _worker_environment() | {"TRITON_CACHE_DIR": str(work / "triton")}
        command = [sys.executable, *_WORKER, str(work / "jobs"), str(work)]
        with (
            open(work / "stderr", "w+") as stderr,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
        ):
            assert process.stdout is not None
            answered = set()
            for line in process.stdout:
                result = json.loads(line)
                key = result["id"]
                answered.add(key)
                if "error" in result:
                    errors[key] = result["error"]
                else:
                    _store(cache / key, work, key, result["kernels"])
                if progress:
                    progress(f"{jobs[key].variant.name} {jobs[key].target.name} {jobs[key].config.name}")
            process.wait()
            stderr.seek(0)
            tail = stderr.read()[-2000:].strip()
    for key in jobs.keys() - answered:
        errors[key] = f"the compiler ended, {describe_exit(process.returncode)}: {tail or 'no message'}"
    return errors


def _store(entry: Path, work: Path, key: str, kernels: list[dict[str, Any]]) -> None:
    """Move one result into the cache, atomically by a rename."""
    staged = work / f"entry-{key}"
    staged.mkdir()
    for kernel in kernels:
        name = kernel["meta"]["entry"]
        os.replace(work / f"{key}.{name}", staged / name)
    (staged / "result.json").write_text(json.dumps(kernels, sort_keys=True))
    try:
        os.replace(staged, entry)
    except OSError:  # another process was faster; its result has the same bytes
        if not (entry / "result.json").is_file():
            raise


def _read_cached(entry: Path, job: _CompileJob, version: str) -> CompiledVariant:
    kernels = {
        kernel["meta"]["entry"]: CompiledKernel(
            (entry / kernel["meta"]["entry"]).read_bytes(), kernel["meta"], Resources(**kernel["resources"])
        )
        for kernel in json.loads((entry / "result.json").read_text())
    }
    return CompiledVariant(job.variant, job.config, job.target, version, job.source, kernels)
