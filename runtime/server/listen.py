"""The server's address, bound before anything slow: a busy port must fail before minutes of loading weights."""

from __future__ import annotations

import errno
import os
import socket

from flexspec.errors import PortError

BACKLOG = 2048

_FIXES = {
    errno.EADDRINUSE: "stop the process that uses it (`ss -ltnp` shows it) or choose another --port",
    errno.EACCES: "choose a --port of 1024 or above, or run with the right to bind it",
    errno.EADDRNOTAVAIL: "choose a --host that is an address of this machine, or 0.0.0.0",
}


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind and listen; port 0 takes a free one. Raises PortError naming the address and the fix.

    Listening already keeps a second process off: two sockets with SO_REUSEADDR may both be bound while neither
    listens. Early clients wait in the backlog until the server runs.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would take the port modulo 65536
        raise PortError(
            f"cannot listen on {host}:{port} (no such port)", "a port from 0 to 65535", "choose such a --port"
        )
    listener: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name, such as a label of 64 letters
        if listener is not None:
            listener.close()
        raise _port_error(host, port, error) from error
    return listener


def _port_error(host: str, port: int, error: OSError | UnicodeError) -> PortError:
    if isinstance(error, socket.gaierror | UnicodeError):
        reason, fix = "no such host", "choose a --host that resolves, such as 127.0.0.1"
    else:
        number = error.errno or 0
        reason, fix = os.strerror(number), _FIXES.get(number, "choose another --host or --port")
    return PortError(f"cannot listen on {host}:{port} ({reason})", "an address that is free", fix)
