"""The server's addresses, bound before anything slow: a busy port must fail before minutes of loading weights."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from flexspec.errors import PortError

BACKLOG = 2048
_TRIES = 16  # to find a free port that is free on all addresses of a name

_FIXES = {
    errno.EADDRINUSE: "stop the process that uses it (`ss -ltnp` shows it) or choose another --port",
    errno.EACCES: "choose a --port of 1024 or above, or run with the right to bind it",
    errno.EADDRNOTAVAIL: "choose a --host that is an address of this machine, or 0.0.0.0",
}
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # an address of a name that this machine does not have


@dataclass(frozen=True, slots=True)
class Listener:
    """Listening sockets: one, or one for each address of a host name, all on the same port."""

    sockets: tuple[socket.socket, ...]
    path: str = ""  # of a unix socket

    @property
    def port(self) -> int:
        """0 for a unix socket."""
        return 0 if self.path else int(self.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """What clients can be given."""
        if self.path:
            return f"unix:{self.path}"
        host = self.sockets[0].getsockname()[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reserve_port(host: str, port: int) -> Listener:
    """Listen on all addresses of ``host``; port 0 takes a free one. Raises PortError naming address and fix.

    Listening already keeps a second process off: two sockets with SO_REUSEADDR may both be bound while neither
    listens. Early clients wait in the backlog until the server runs.
    """
    if not host:  # getaddrinfo would take it for all addresses
        raise PortError("--host is empty", "an address", "leave --host out for 127.0.0.1; 0.0.0.0 is all addresses")
    if not 0 <= port <= 65535:  # getaddrinfo would take the port modulo 65536
        raise PortError(
            f"cannot listen on {host}:{port} (no such port)", "a port from 0 to 65535", "choose such a --port"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name, such as a label of 64 letters
        raise _port_error(host, port, error) from error
    # IPv4 first: the ready line names the first, and more clients can use it.
    addresses = sorted(dict.fromkeys((each[0], each[4]) for each in found), key=lambda each: each[0])
    for tries_left in reversed(range(_TRIES)):
        try:
            return Listener(_listen_on_all(addresses))
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE or not tries_left:
                raise _port_error(host, port, error) from error
    raise AssertionError("the last try raises")


def reserve_path(path: Path) -> Listener:
    """Listen on a unix socket. Replaces one that nobody listens on; raises PortError for anything else there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        found = f"cannot listen on unix socket {path} ({reason})"
        raise PortError(found, "a path that is free", "stop the server there, or choose another --uds") from error
    return Listener((listener,), str(path))


def _is_left_over(path: Path) -> bool:
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _listen_on_all(addresses: Sequence[tuple[socket.AddressFamily, tuple[Any, ...]]]) -> tuple[socket.socket, ...]:
    """A socket for each address that this machine has, at least one. Raises OSError."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, (host, port, *scope) in addresses:
            try:
                # Port 0: the first address chooses the port of the others.
                chosen = sockets[0].getsockname()[1] if sockets and not port else port
                sockets.append(_listening(family, (host, chosen, *scope), alone=len(addresses) == 1))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
        if missing is not None and not sockets:
            raise missing
    except OSError:
        for each in sockets:
            each.close()
        raise
    return tuple(sockets)


def _listening(family: socket.AddressFamily, address: tuple[object, ...], alone: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        if family == socket.AF_INET6 and not alone:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _port_error(host: str, port: int, error: OSError | UnicodeError) -> PortError:
    if isinstance(error, socket.gaierror | UnicodeError):
        reason, fix = "no such host", "choose a --host that resolves, such as 127.0.0.1"
    else:
        number = error.errno or 0
        reason, fix = os.strerror(number), _FIXES.get(number, "choose another --host or --port")
    return PortError(f"cannot listen on {host}:{port} ({reason})", "an address that is free", fix)
