"""One rank of a link measurement over torch.distributed (gloo): run as ``python -m flexspec.runtime.link_probe``.

Rank 0 prints JSON: microseconds of transfers and of all-reduces by bytes. ``probe_links`` starts all ranks.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from flexspec.errors import ToolchainError

SIZES = (8, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)  # bytes
_REPEATS, _WARM, _TIMEOUT_S = 15, 3, 120


def probe_links(ranks: int) -> tuple[dict[int, float], dict[int, float]]:
    """(transfers, all-reduces): bytes -> median us between ``ranks`` processes. Raises ToolchainError without torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "flexspec.runtime.link_probe"]
    started = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        answers = [each.communicate(timeout=_TIMEOUT_S) for each in started]
    except subprocess.TimeoutExpired:
        raise ToolchainError(
            f"no answer from {ranks} ranks in {_TIMEOUT_S} s", "gloo over loopback", "use --no-links"
        ) from None
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
                each.wait()
    if any(each.returncode for each in started):
        last = next(err for each, (_, err) in zip(started, answers, strict=True) if each.returncode).strip()
        found = last.splitlines()[-1] if last else "a rank ended without a word"
        raise ToolchainError(f"links could not be measured: {found}", "torch with gloo", "install torch, or --no-links")
    body = json.loads(answers[0][0])
    return tuple({int(size): float(us) for size, us in body[key].items()} for key in ("transfer", "reduce"))  # type: ignore[return-value]


def _median_us(call: Callable[[], object]) -> float:
    times = []
    for i in range(_WARM + _REPEATS):
        began = time.perf_counter()
        call()
        if i >= _WARM:
            times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    body: dict[str, dict[int, float]] = {"transfer": {}, "reduce": {}}
    for size in SIZES:
        data = torch.zeros(size, dtype=torch.uint8)
        floats = torch.zeros(max(1, size // 4), dtype=torch.float32)

        def there_and_back(data: torch.Tensor = data) -> None:
            if rank == 0:
                dist.send(data, 1)
                dist.recv(data, 1)
            elif rank == 1:
                dist.recv(data, 0)
                dist.send(data, 0)

        dist.barrier()
        body["transfer"][size] = _median_us(there_and_back) / 2
        dist.barrier()
        body["reduce"][size] = _median_us(lambda floats=floats: dist.all_reduce(floats))  # type: ignore[misc]
    if rank == 0:
        print(json.dumps(body))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
