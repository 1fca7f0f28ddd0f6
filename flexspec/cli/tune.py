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
The model invents prompts, answers them, and an SSM is trained to predict the answers. No other data is used. Running
the same command again resumes an interrupted run.

example:
  flexspec tune build/models/SmolLM2-135M-Instruct.Q4_1.gguf -o build/my-ssm
(`make demo` puts the model there)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; defaults come from TuneConfig."""
    from flexspec.runtime.tune.config import TuneConfig

    d = TuneConfig()
    parser.epilog = EPILOG
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="the LLM: a .gguf file or a Hugging Face folder")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write the SSM to")
    add("--work", type=Path, metavar="DIR", help="folder for shards and checkpoints (default: in the cache)")
    numbers = (
        (
            "--shards",
            int,
            d.generate.shards,
            f"number of shards to write, of {d.generate.shard_size} conversations each",
        ),
        ("--batch", int, d.generate.batch, "conversations written at a time; affects only speed"),
        ("--epochs", float, d.train.epochs, "passes over the data"),
        ("--learning-rate", float, d.train.learning_rate, "peak learning rate"),
        ("--vocab", int, d.reduced_vocab_size, "number of tokens that the SSM is trained on"),
        ("--draft-vocab", int, d.draft_vocab_size, "number of these tokens that it drafts"),
        ("--ngram-bytes", int, d.ngram_bytes, "maximum size of the n-gram table, in bytes"),
        ("--threads", int, d.train.threads, "CPU threads"),
        ("--seed", int, d.train.seed, "seed of the data and of training"),
    )
    for flag, kind, default, text in numbers:
        add(flag, type=kind, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    add("--tap-layers", type=int, nargs="+", default=list(d.tap_layers), metavar="N",
        help="LLM layers whose outputs the SSM reads besides the last one's (default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 when the folder is written."""
    for name, low in (("shards", 1), ("batch", 1), ("threads", 1), ("epochs", 0.01), ("learning_rate", 1e-9)):
        if getattr(args, name) < low:
            flag = "--" + name.replace("_", "-")
            raise TuneError(f"{flag} {getattr(args, name)}", f"at least {low}", f"pass a larger {flag}")
    from flexspec.runtime.tune.host import restart_with_huge_pages

    if sys.argv[1:2] == ["tune"]:  # this process is the command, not a program that calls it
        restart_with_huge_pages()
    try:
        from flexspec.runtime.tune.run import tune
    except ModuleNotFoundError as error:
        raise TuneError(
            f"no package {error.name}", "the packages that training needs", 'pip install "flexspec[tune]"'
        ) from error
    from flexspec.cli.progress import progress_bars
    from flexspec.host.cache import cache_root
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
        draft_vocab_size=args.draft_vocab,
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
    """The command that gives the same result: options that differ from the defaults, paths by their last part."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["flexspec", "tune", args.model.name, "-o", "/".join(args.output.parts[-2:])]
    for option in ("shards", "epochs", "learning_rate", "vocab", "draft_vocab", "tap_layers", "ngram_bytes", "seed"):
        value = getattr(args, option)
        if value != parser.get_default(option):
            words += ["--" + option.replace("_", "-"), *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
