"""Two network namespaces joined by a pair of virtual cables: two hosts as far as sockets can tell. Linux, as root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_HERE = "/proc/thread-self/ns/net"
LINK = "flexspec0"  # the cable's name on both hosts


@dataclass(frozen=True, slots=True)
class Host:
    """``namespace`` is an open file descriptor."""

    namespace: int
    address: str

    @contextmanager
    def here(self) -> Iterator[None]:
        """The calling thread is on this host, and so are processes and sockets that it makes."""
        back = os.open(_HERE, os.O_RDONLY)
        try:
            _call("setns", self.namespace, _CLONE_NEWNET)
            yield
        finally:
            _call("setns", back, _CLONE_NEWNET)
            os.close(back)

    def unplug(self) -> None:
        """Take the cable out: nothing is closed, nothing arrives any more."""
        with self.here():
            _ip("link", "set", LINK, "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Hosts that reach one another and nothing else, and end with the block. Skips the test where that is forbidden."""
    if shutil.which("ip") is None or not Path(_HERE).exists():
        pytest.skip("network namespaces need Linux and the command ip")
    with ExitStack() as stack:
        try:
            first, second = (Host(_new_namespace(stack), f"10.83.0.{number}") for number in (1, 2))
            with first.here():
                _ip("link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", _path(second.namespace))
            for host in (first, second):
                with host.here():
                    _ip("link", "set", "lo", "up")
                    _ip("address", "add", f"{host.address}/24", "dev", LINK)
                    _ip("link", "set", LINK, "up")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield first, second


def _new_namespace(stack: ExitStack) -> int:
    back = os.open(_HERE, os.O_RDONLY)
    try:
        _call("unshare", _CLONE_NEWNET)
        made = os.open(_HERE, os.O_RDONLY)
        stack.callback(os.close, made)
        _call("setns", back, _CLONE_NEWNET)
    finally:
        os.close(back)
    return made


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
