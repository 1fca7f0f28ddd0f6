"""The ``flexspec`` command: picks the subcommand, runs it, and turns typed errors into one line and an exit code.

A subcommand is one module of this folder with ``add_arguments(parser)`` and ``run(args) -> int``, listed in COMMANDS.
Only the module of the requested command is imported, so ``flexspec --help`` stays fast. Exit codes: 0 done, 1 a check
or run failed, 2 wrong usage or a user error, 130 interrupted, 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from flexspec import __version__
from flexspec.errors import FlexspecError
from flexspec.host.causes import SYSTEM_ERRORS, Terminated, end_by_exception, user_error

COMMANDS: dict[str, str] = {
    "compile": "compile a model and its SSM into one artifact, NAME.fspec",
    "generate": "complete one prompt with an artifact, with or without speculation",
    "serve": "serve an artifact over an OpenAI-compatible HTTP interface",
    "inspect": "show the contents of an artifact, a model or a graph file",
    "plan": "search for a parallel plan for a model, its SSM and a machine; no weights are needed",
    "calibrate": "measure this machine and write a machine file for plan",
    "bench": "measure how many tokens an artifact's draft plans commit per round",
    "doctor": "show what compile and serve would see on this machine, and what would stop them",
    "tune": "train an SSM for a model on text that the model writes itself",
}

EPILOG = """\
example:
  flexspec compile build/models/SmolLM2-135M-Instruct.Q4_1.gguf --ssm ssm/smollm2-135m -o build/smollm2.fspec
  flexspec generate build/smollm2.fspec -p "Why is the sky blue?"
  flexspec serve build/smollm2.fspec --port 8000
(`make demo` puts the model and the artifact there)

Set FLEXSPEC_DEBUG=1 to see the full traceback of an error.
"""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser. Only ``command`` has its arguments; the others have just a name and a help line."""
    parser = argparse.ArgumentParser(
        prog="flexspec",
        description="Compile and serve language models with lossless token-tree speculation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flexspec {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=help_line,
            description=help_line[0].upper() + help_line[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == command:
            module = importlib.import_module(f"flexspec.cli.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. argparse itself exits with 2 on wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The top level has no option that takes a value, so the first word that is not an option is the command.
    command = next((word for word in arguments if not word.startswith("-")), None)
    _open_closed_streams()
    args = build_parser(command).parse_args(arguments)
    try:
        if argv is None and "RANK" not in os.environ:  # ranks are ended by their launcher, in its own order
            end_by_exception(signal.SIGTERM)
        code = int(args.run(args))
        sys.stdout.flush()  # a full disk behind ``> file`` shows here, while it can still be said
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_output()  # the reader of our output is gone (``| head``)
        return 0
    except Terminated:
        print(f"flexspec {args.command}: ended by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except (FlexspecError, *SYSTEM_ERRORS) as error:
        if os.environ.get("FLEXSPEC_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            _forget_output()
        print(f"flexspec {args.command}: {user_error(error)}", file=sys.stderr)
        return 2


def _open_closed_streams() -> None:
    """A closed standard stream (``>&-``) is as one that nobody reads; its number must not go to a file of ours."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _forget_output() -> None:
    """Keep the interpreter's last flush from complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
