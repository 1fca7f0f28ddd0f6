"""Notices ranks that vanish without closing their connections: a host that loses power, a cable that is pulled.

gloo learns of a dead process from its closed connections, and of a vanished host not at all. So each rank holds one
more connection to rank 0, on which nothing is sent: the kernels at both ends probe each other once a second (TCP
keep-alive), and close it after three seconds without an answer. A process that is merely busy, stopped or swapping
still answers; one that is alive and hangs is left to the time limit of a step. When a connection ends, all of this
process's other connections to ranks are shut down, so that whoever waits on one gets an error, as if the peer had died.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from flexspec.host.exits import GONE

SILENT_S = 3
_JOIN_S = 60.0
_KEY_S = 5.0  # within which a new connection must send the key
_KEY_BYTES = 16
_BYE = b"."  # before an orderly end, by either side


class PeerWatch:
    """One rank's connections to rank 0, or rank 0's to all others. ``lost`` says why there can be no further step."""

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup) -> None:
        """Called on all ranks together, once all their other connections are made.

        Raises RuntimeError when they do not find each other.
        """
        self.lost = ""
        self._report: Callable[[str], None] | None = None
        self._closing = False
        self._connections = _connections()
        try:
            self._peers = _accept(world, group) if rank == 0 else {0: _connect(rank, group)}
            for peer in self._peers.values():
                _keep_alive(peer)
        except OSError as error:
            raise RuntimeError(f"ranks cannot reach rank 0 at {os.environ['MASTER_ADDR']}: {error}") from None
        self._thread = threading.Thread(target=self._wait_for_loss, name="flexspec-watch", daemon=True)
        self._thread.start()

    def on_loss(self, report: Callable[[str], None]) -> None:
        """Have ``report`` called, from the watching thread, with the reason when a rank is lost; at once if one is."""
        self._report = report
        if self.lost:
            report(self.lost)

    def close(self) -> None:
        """Announce an orderly end. Idempotent."""
        self._closing = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.sendall(_BYE)
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        for peer in self._peers.values():
            peer.close()

    def _wait_for_loss(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    reason = _end_of(self._peers[key.data])
                    if reason and not self._closing:
                        self._lose(f"rank {key.data} {reason}")
                        return

    def _lose(self, reason: str) -> None:
        self.lost = reason
        if self._report is not None:
            self._report(reason)
        for descriptor, inode in self._connections.items():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)


def _end_of(peer: socket.socket) -> str:
    """Why a connection ended; empty after an orderly end."""
    try:
        return "" if peer.recv(1) == _BYE else "is gone"
    except ConnectionResetError:
        return "is gone"
    except OSError as error:
        return f"{GONE}: no sign of its host for {SILENT_S} s ({error.strerror})"


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENT_S, "TCP_USER_TIMEOUT": 1000 * SILENT_S}
    for name, value in values.items():
        if hasattr(socket, name):  # Linux has all of them
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _accept(world: int, group: dist.ProcessGroup) -> Mapping[int, socket.socket]:
    """Rank 0's side: broadcast port and key, and wait until every peer has connected."""
    key = secrets.token_bytes(_KEY_BYTES)
    peers: dict[int, socket.socket] = {}
    with _listen() as listener:
        port = int(listener.getsockname()[1])
        dist.broadcast(torch.tensor([*port.to_bytes(2), *key], dtype=torch.uint8), 0, group)
        give_up = time.monotonic() + _JOIN_S
        while len(peers) < world - 1:
            listener.settimeout(max(0.001, give_up - time.monotonic()))
            peer, _ = listener.accept()
            peer.settimeout(_KEY_S)
            hello = _read(peer, _KEY_BYTES + 4)
            if hello[:_KEY_BYTES] == key:
                peer.settimeout(None)
                peers[int.from_bytes(hello[_KEY_BYTES:])] = peer
            else:
                peer.close()  # not a rank of this plan
    return peers


def _connect(rank: int, group: dist.ProcessGroup) -> socket.socket:
    address = torch.empty(2 + _KEY_BYTES, dtype=torch.uint8)  # port and key
    dist.broadcast(address, 0, group)
    words = bytes(address.tolist())
    peer = socket.create_connection((os.environ["MASTER_ADDR"], int.from_bytes(words[:2])), timeout=_JOIN_S)
    peer.sendall(words[2:] + rank.to_bytes(4))
    peer.settimeout(None)
    return peer


def _listen() -> socket.socket:
    """On the address by which the others know rank 0's host; on all addresses if the host does not have it (NAT)."""
    with contextlib.suppress(OSError):
        address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[4][:2], family=address[0])
    return socket.create_server(("", 0))


def _read(peer: socket.socket, size: int) -> bytes:
    """``size`` bytes, or fewer if the connection ends."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < size and (more := peer.recv(size - len(data))):
            data += more
    return data


def _connections() -> Mapping[int, int]:
    """IP connections that this process has now: descriptor to inode, which identifies a connection later."""
    connections = {}
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").is_dir() else Path("/dev/fd")
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # no longer open, or not connected
            status = os.fstat(int(name))
            if int(name) > 2 and stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                        connections[int(name)] = status.st_ino
    return connections
