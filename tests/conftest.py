"""Rules of every test run: one thread for torch and BLAS, no network beyond loopback, the same examples each time."""

from __future__ import annotations

import os

# Before numpy or torch is imported anywhere: their thread pools read these once.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("flexspec", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("flexspec")

_LOOPBACK_PREFIXES = ("127.", "::1", "localhost")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Built kernels are shared by all tests and workers of a run; FLEXSPEC_CACHE keeps them from run to run."""
    base = tmp_path_factory.getbasetemp()
    run = (
        base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    )  # each worker has a folder of its own in the run's
    with pytest.MonkeyPatch.context() as patch:
        if "FLEXSPEC_CACHE" not in os.environ:
            patch.setenv("FLEXSPEC_CACHE", str(run / "cache"))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test is not called slow without saying what takes the time."""
    silent = [item.nodeid for item in items for mark in item.iter_markers("slow") if not mark.kwargs.get("reason")]
    if silent:
        raise pytest.UsageError(f"pytest.mark.slow needs reason=...: {', '.join(silent)}")
    changing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if changing:  # xdist wants the same ids in every process
        raise pytest.UsageError(f"ids with an address in memory: {', '.join(changing[:3])}")
    # The longest files first: one of two minutes that comes last would leave the other workers idle.
    items.sort(key=lambda item: 0 if item.get_closest_marker("real") else 1 if item.get_closest_marker("ranks") else 2)


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Refuse connections to other machines: a test that needs one is wrong, and would fail elsewhere."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        is_internet = self.family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and not str(address[0]).startswith(_LOOPBACK_PREFIXES):
            raise RuntimeError(f"a test tried to reach {address!r}; tests use loopback only")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield
