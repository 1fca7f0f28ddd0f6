"""Options of ``serve`` about HTTP: addresses, who may come in, and what is written down."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexspec.errors import RequestError

if TYPE_CHECKING:
    from flexspec.runtime.server.door import DoorOptions
    from flexspec.runtime.server.listen import Listener

KEY_VARIABLE = "FLEXSPEC_API_KEY"
DEFAULT_MAX_TOKENS = 1024


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on, or a name: all its addresses (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    parser.add_argument("--uds", type=Path, metavar="PATH", help="listen on this unix socket instead")
    parser.add_argument("--root-path", default="", metavar="PATH", help="path under which a proxy shows the server")
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of web pages that may use the server, as http://localhost:3000; * for all (default none)",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"ask for this key; may be repeated (default {KEY_VARIABLE} of the environment, else none)",
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="ask for one of the keys in FILE, one a line")
    parser.add_argument("--access-log", metavar="FILE", help="append a JSON line a request to FILE; - for stdout")
    parser.add_argument(
        "--default-max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="longest answer to a chat that names no max_tokens; each running request reserves its whole length in the "
        f"KV pool (default {DEFAULT_MAX_TOKENS})",
    )


def reserve_address(args: argparse.Namespace) -> Listener:
    """The sockets that ``--uds``, or ``--host`` and ``--port``, name. Raises PortError."""
    from flexspec.runtime.server.listen import reserve_path, reserve_port

    return reserve_port(args.host, args.port) if args.uds is None else reserve_path(args.uds)


def door_options(args: argparse.Namespace) -> DoorOptions:
    """What the options say. Raises RequestError for one that cannot be."""
    from flexspec.runtime.server.door import DoorOptions, key_digest

    if args.default_max_tokens < 1:
        raise _wrong("--default-max-tokens", args.default_max_tokens, "1 or more")
    root = args.root_path.rstrip("/")
    if root and not root.startswith("/"):
        raise _wrong("--root-path", args.root_path, "a path that begins with /")
    return DoorOptions(
        origins=tuple(origin.rstrip("/") for origin in args.cors_origin),
        key_digests=tuple(key_digest(key) for key in _api_keys(args)),
        root_path=root,
        access_log=None if args.access_log is None else _access_log(args.access_log),
    )


def _api_keys(args: argparse.Namespace) -> list[str]:
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            lines = args.api_key_file.read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise _wrong("--api-key-file", args.api_key_file, f"a file of keys that can be read ({error})") from None
        keys += [line.strip() for line in lines if line.strip()]
        if not keys:
            raise _wrong("--api-key-file", args.api_key_file, "a key in the file")
    if not keys and os.environ.get(KEY_VARIABLE):
        keys = [os.environ[KEY_VARIABLE]]
    if not all(keys):  # an unset variable must not open the server
        raise _wrong("--api-key", "", "a key that is not empty")
    return keys


def _access_log(name: str) -> Callable[[dict[str, Any]], None]:
    import json

    try:
        # Each line is one write that appends, so that several servers may share the file.
        file = None if name == "-" else os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise _wrong("--access-log", name, f"a file that can be written ({error.strerror})") from None
    broken = False

    def write(entry: dict[str, Any]) -> None:
        nonlocal broken
        try:
            if file is None:
                print(json.dumps(entry), flush=True)
            else:
                os.write(file, json.dumps(entry).encode() + b"\n")
        except (OSError, ValueError) as error:  # a full disk or a closed pipe must not end requests
            if not broken:
                print(f"flexspec: cannot write to the access log {name} ({error})", file=sys.stderr)
            broken = True

    return write


def _wrong(option: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{option} {value}", expected, f"give {option} as expected", param=option)
