"""The process that compiles Triton kernels ahead of time, with no GPU: one JSON job a line in, one result a line out.

Run as ``python -m flexspec.kernels.gpu.worker JOBS_FILE OUT_FOLDER`` by gpu/aot.py only. A process of its own because
Triton decides at import whether it interprets or compiles, and because a compiler crash must not take down the caller.
Imports Triton and never torch. A job is {id, source_path, target, entries}, an entry
{name, params, warps, stages}; a result is {id, kernels} or {id, error}. Binaries go to OUT_FOLDER/ID.ENTRY.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from flexspec.kernels.gpu.targets import Target, target_of


def main(jobs_file: str, out_folder: str) -> None:
    """Compile every job of the file, printing each result as soon as it is ready."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print to stdout when they fail; that stream carries results only
    for line in Path(jobs_file).read_text().splitlines():
        job = json.loads(line)
        try:
            result: dict[str, Any] = {"kernels": _compile_job(job, Path(out_folder))}
        except Exception as error:  # whatever the compiler raises is a result, and the next job is still done
            result = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        print(json.dumps({"id": job["id"], **result}), file=results, flush=True)


def _compile_job(job: dict[str, Any], out_folder: Path) -> list[dict[str, Any]]:
    module = _load(Path(job["source_path"]))
    target = target_of(job["target"])
    kernels = []
    for entry in job["entries"]:
        compiled = _compile_entry(getattr(module, entry["name"]), entry, target)
        binary = compiled.asm["hsaco" if target.backend == "hip" else "cubin"]
        path = out_folder / f"{job['id']}.{entry['name']}"
        path.write_bytes(binary)
        metadata = compiled.metadata
        registers, spill_bytes = _resources(compiled, target, path)
        meta = {
            "entry": entry["name"],
            "symbol": metadata.name,
            "target": target.name,
            "params": entry["params"],
            "warps": metadata.num_warps,
            "warp_size": target.warp_size,
            "stages": entry["stages"],
            "shared_bytes": metadata.shared,
            "global_scratch_bytes": getattr(metadata, "global_scratch_size", 0),  # absent for hip in Triton 3.6
            "profile_scratch_bytes": getattr(metadata, "profile_scratch_size", 0),
        }
        resources = {"registers": registers, "spill_bytes": spill_bytes, "shared_bytes": metadata.shared}
        kernels.append({"meta": meta, "resources": resources})
    return kernels


def _compile_entry(function: Any, entry: dict[str, Any], target: Target) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict(entry["params"])
    # Without the assumption of 16-byte alignment, vector loads and asynchronous copies disappear.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    return triton.compile(
        ASTSource(fn=function, signature=signature, constexprs={}, attrs=aligned),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        # enable_fp_fusion is named because its default changes between Triton versions.
        options={"num_warps": entry["warps"], "num_stages": entry["stages"], "enable_fp_fusion": True},
    )


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _resources(compiled: Any, target: Target, binary: Path) -> tuple[int, int]:
    """(registers a thread, bytes spilled to memory a thread)."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        vectors, accumulators = _field(r"\.vgpr_count:\s+(\d+)", text), _field(r"\.agpr_count:\s+(\d+)", text)
        spilled = 4 * _field(r"\.vgpr_spill_count:\s+(\d+)", text)
        return max(vectors, accumulators), max(spilled, _field(r"\.private_segment_fixed_size:\s+(\d+)", text))
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    return _field(r"REG:(\d+)", report), _field(r"STACK:(\d+)", report) + _field(r"LOCAL:(\d+)", report)


def _field(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise LookupError(f"no {pattern!r} in the resource report")
    return int(match[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
