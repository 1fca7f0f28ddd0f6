"""The connection beside the data path: who may join, what ends it, and what its end does. Hosts: test_two_hosts.py."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest

from flexspec.runtime.distributed import watch as distributed_watch
from flexspec.runtime.distributed.watch import PeerWatch

TIMEOUT_S = 60.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Queue[bytes]:
    """What rank 0 tells all ranks. The others get it once a test has put it back."""
    said: Queue[bytes] = Queue()
    heard: Queue[bytes] = Queue()

    def broadcast(tensor: Any, root: int, group: Any) -> None:
        if group == "rank 0":
            said.put(bytes(tensor.tolist()))
        else:
            tensor.copy_(distributed_watch.torch.tensor(list(heard.get(timeout=TIMEOUT_S)), dtype=tensor.dtype))

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(distributed_watch.dist, "broadcast", broadcast)
    monkeypatch.setattr(PeerWatch, "heard", heard, raising=False)
    return said


@pytest.fixture
def watches(told: Queue[bytes]) -> Iterator[tuple[PeerWatch, PeerWatch]]:
    """Rank 0's and rank 1's, and two strangers at the door."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(PeerWatch, 0, 2, "rank 0")
        words = told.get(timeout=TIMEOUT_S)
        address = ("127.0.0.1", int.from_bytes(words[:2]))
        with socket.create_connection(address) as stranger:
            stranger.sendall(bytes(20))
            assert stranger.recv(1) == b"", "a wrong key is turned away"
        socket.create_connection(address).close()
        PeerWatch.heard.put(words)  # type: ignore[attr-defined]
        second = pool.submit(PeerWatch, 1, 2, "rank 1")
        pair = first.result(TIMEOUT_S), second.result(TIMEOUT_S)
    yield pair
    for watch in pair:
        watch.close()


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection that is there before ranks are watched, as gloo's are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


def test_an_orderly_end_is_no_loss(
    connection: tuple[socket.socket, socket.socket], watches: tuple[PeerWatch, PeerWatch]
) -> None:
    first, second = watches
    second.close()
    first.close()
    assert (first.lost, second.lost) == ("", "")
    connection[0].sendall(b"x")
    assert connection[1].recv(1) == b"x"


@pytest.mark.parametrize("dies", [0, 1])
def test_a_death_is_told_and_ends_all_connections(
    connection: tuple[socket.socket, socket.socket], watches: tuple[PeerWatch, PeerWatch], dies: int
) -> None:
    lost: Queue[str] = Queue()
    watches[1 - dies].on_loss(lost.put)
    for peer in watches[dies]._peers.values():
        peer.shutdown(socket.SHUT_WR)  # all that another host sees of a process that dies
    assert lost.get(timeout=TIMEOUT_S) == f"rank {dies} is gone"
    connection[0].settimeout(TIMEOUT_S)
    assert connection[0].recv(1) == b""
    late: Queue[str] = Queue()
    watches[1 - dies].on_loss(late.put)
    assert late.get_nowait() == f"rank {dies} is gone", "who asks later is told at once"
