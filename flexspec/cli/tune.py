"""``flexspec tune``: train an SSM for a model on text that the model writes itself."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

from flexspec.errors import TuneError

EPILOG = """\
The model invents prompts, answers them, and an SSM is trained to predict the answers. No other data is used. An
interrupted run goes on where it was when the same command is given again.

example:
  flexspec tune SmolLM2-135M-Instruct.Q4_1.gguf -o ssm/smollm2-135m
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; defaults come from TuneConfig."""
    from flexspec.runtime.tune.config import TuneConfig

    d = TuneConfig()
    parser.epilog = EPILOG
    parser.add_argument("model", type=Path, metavar="MODEL", help="the LLM: a .gguf file or a Hugging Face folder")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write the SSM to")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="folder for shards and checkpoints (default: the cache)"
    )
    parser.add_argument("--shards", type=int, default=d.generate.shards, metavar="N",
                        help=f"shards of {d.generate.shard_size} conversations to write (default: %(default)s)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=d.generate.batch, metavar="N",
                        help="conversations written at a time; changes speed only (default: %(default)s)")  # fmt: skip
    parser.add_argument("--epochs", type=float, default=d.train.epochs, metavar="X",
                        help="passes over the data (default: %(default)s)")  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=d.train.learning_rate, metavar="X",
                        help="peak rate (default: %(default)s)")  # fmt: skip
    parser.add_argument("--vocab", type=int, default=d.reduced_vocab_size, metavar="N",
                        help="tokens the SSM can draft (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tap-layers", type=int, nargs="+", default=list(d.tap_layers), metavar="N",
                        help="LLM layers whose outputs the SSM reads beside the last (default: %(default)s)")  # fmt: skip
    parser.add_argument("--ngram-bytes", type=int, default=d.ngram_bytes, metavar="N",
                        help="most bytes of the n-gram table (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=d.train.threads, metavar="N",
                        help="CPU threads (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=d.train.seed, metavar="N", help="seed (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 when the folder is written."""
    for name, low in (("shards", 1), ("batch", 1), ("threads", 1), ("epochs", 0.01), ("learning_rate", 1e-9)):
        if getattr(args, name) < low:
            flag = "--" + name.replace("_", "-")
            raise TuneError(f"{flag} {getattr(args, name)}", f"at least {low}", f"give a larger {flag}")
    try:
        from flexspec.runtime.tune.run import tune
    except ModuleNotFoundError as error:
        raise TuneError(
            f"no package {error.name}", "the packages that training needs", 'pip install "flexspec[tune]"'
        ) from error
    from flexspec.cli.progress import progress_bars
    from flexspec.kernels.cpu_build import cache_root
    from flexspec.runtime.tune.config import TuneConfig

    d = TuneConfig()
    config = replace(
        d,
        generate=replace(d.generate, shards=args.shards, batch=args.batch, seed=args.seed),
        train=replace(
            d.train, epochs=args.epochs, learning_rate=args.learning_rate, threads=args.threads, seed=args.seed
        ),
        tap_layers=tuple(args.tap_layers),
        reduced_vocab_size=args.vocab,
        ngram_bytes=args.ngram_bytes,
    )
    with progress_bars() as progress:
        result = tune(
            args.model, args.output, args.work or cache_root() / "tune", config, progress, _log, command_line(args)
        )
    if args.json:
        print(json.dumps(asdict(result), sort_keys=True))
    else:
        print(f"wrote {args.output}: top-1 hit rates by depth {[hits[0] for hits in result.greedy.hits]}")
    return 0


def command_line(args: argparse.Namespace) -> str:
    """The command that makes the same result: options that differ from the defaults, paths by their last part."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["flexspec", "tune", args.model.name, "-o", "/".join(args.output.parts[-2:])]
    for action in parser._actions:
        name = action.dest
        if name in ("shards", "epochs", "learning_rate", "vocab", "tap_layers", "ngram_bytes", "seed"):
            value = getattr(args, name)
            if value != action.default:
                words += [action.option_strings[0], *(str(v) for v in (value if isinstance(value, list) else [value]))]
    return shlex.join(words)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
