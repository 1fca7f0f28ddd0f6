"""Options that ``serve`` and ``generate`` share: how an artifact is run. Also the help on draft plans."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexspec.runtime.open.serve_options import ServeOptions


DRAFT_PLANS = """\
draft plans (--draft), what is kept of the tokens that the sources propose:
  auto              the plan stored in the artifact (serve and generate; their default)
  off               nothing: plain decoding, one token a step
  chain:DEPTH       the best path, DEPTH tokens long
  tree:K1,K2,...    static trees of the SSMs: each node of level i gets Ki children
  budget:NODES      of all sources' nodes those that pay, at most NODES
options follow, each behind a slash, as in budget:24/depth=8/sources=suffix+ssm:
  sources=A+B       of suffix (the request's own text), ngram (the artifact's table), ssm, ssm2, ...
  nodes=N, depth=N  most nodes of the tree, and its depth
  ssm_depth=N, beam=N      levels of an SSM's own tree, and nodes extended at each (budget)
  sampled=deterministic    or mixed: sampled requests draw one child a node from the SSM (tree of one SSM)
"""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft",
        default="auto",
        metavar="PLAN",
        help="auto, off, chain:DEPTH, tree:K1,K2,... or budget:NODES, with options; see below (default auto)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "interpret"),
        default="cpu",
        help="where models run (default cpu); interpret: GPU kernels in Triton's interpreter, slow, for checks",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: one a core, at most 8)")
    parser.add_argument("--kv-tokens", type=int, default=16_384, help="tokens the KV pool holds (default 16384)")
    parser.add_argument("--max-requests", type=int, default=16, help="requests that run at once (default 16)")
    parser.add_argument(
        "--context", type=int, default=0, help="most tokens of prompt and output (default: the model's)"
    )
    parser.add_argument("--no-checks", action="store_true", help="skip digests and the self-test at start")


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """The options, and the environment that the device needs. Raises CapacityError for numbers that cannot work."""
    from flexspec.errors import CapacityError
    from flexspec.runtime.open.serve_options import ServeOptions

    for name, low, high in (
        ("threads", 0, 512),
        ("kv_tokens", 64, 1 << 30),
        ("max_requests", 1, 4096),
        ("context", 0, 1 << 30),
    ):
        value = getattr(args, name)
        if not low <= value <= high:
            option = "--" + name.replace("_", "-")
            raise CapacityError(f"{option} {value}", f"{low} to {high}", f"choose {option} in that range")
    if args.device == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported, which is later
    return ServeOptions(
        draft=args.draft,
        device=args.device,
        threads=args.threads,
        kv_tokens=args.kv_tokens,
        max_requests=args.max_requests,
        context_tokens=args.context,
        checks=not args.no_checks,
    )
