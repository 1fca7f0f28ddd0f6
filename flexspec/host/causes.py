"""What ends a command from outside: the system's refusals as the user's errors, and SIGTERM as an exception.

Only these become a line. Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flexspec.errors import CapacityError, FlexspecError, StorageError
from flexspec.host.files import storage_error

SYSTEM_ERRORS = (OSError, MemoryError, UnicodeError, RecursionError)


class Terminated(BaseException):
    """SIGTERM came: unwinds like KeyboardInterrupt, so that what is half written is removed."""


def end_by_exception(number: signal.Signals) -> None:
    """Have the signal raise Terminated in the main thread, the first time; a second one ends the process at once."""

    def catch(received: int, _: FrameType | None) -> None:
        signal.signal(received, signal.SIG_DFL)
        raise Terminated

    if signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, catch)


def user_error(error: FlexspecError | OSError | MemoryError | UnicodeError | RecursionError) -> FlexspecError:
    """``error`` as one with a code and a fix."""
    if isinstance(error, FlexspecError):
        return error
    again = "FLEXSPEC_DEBUG=1 shows where"
    if isinstance(error, OSError):
        if isinstance(error.filename, str | bytes | Path) and error.filename:
            name = error.filename
            return storage_error(error, Path(name.decode(errors="replace") if isinstance(name, bytes) else name))
        return StorageError(str(error.strerror or error)[:200], "a system that lets this be done", again)
    if isinstance(error, MemoryError):
        return CapacityError(
            f"out of memory ({str(error)[:200] or 'an allocation was refused'})", "more memory",
            "close other programs, raise the limit (ulimit -v, the container's), or choose a smaller model or pool",
        )  # fmt: skip
    if isinstance(error, UnicodeError):
        return StorageError(
            f"text that is not UTF-8 ({str(error)[:200]})", "UTF-8", f"convert the file or name; {again}"
        )
    return StorageError("a file nested too deeply to be read", "what tools usually write", again)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raises what the system refuses as the error that the commands print."""
    try:
        yield
    except SYSTEM_ERRORS as error:
        raise user_error(error) from error
