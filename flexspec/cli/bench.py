"""``flexspec bench X.fspec --acceptance``: measure how many tokens an artifact's draft plans commit per round."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flexspec.host.files import write_file

EPILOG = """\
--acceptance answers the prompts with each draft plan and measures the mean number of nodes at each depth and of tokens
that a round commits. flexspec plan reads them from the profile.

example:
  flexspec bench build/smollm2.fspec --acceptance --count 4 --draft chain:2/sources=ssm -o build/acceptance.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("artifact", type=Path, help="an artifact with an SSM, made by flexspec compile")
    parser.add_argument("--acceptance", action="store_true", help="measure an acceptance profile for flexspec plan")
    parser.add_argument(
        "--draft",
        action="append",
        metavar="PLAN",
        help="a draft plan to measure, as in serve; may be repeated (default: seven chains and trees of one SSM)",
    )
    parser.add_argument(
        "--prompts", type=Path, help='JSON lines, {"prompt": "..."} or {"turns": [...]} (default: 48 shipped prompts)'
    )
    parser.add_argument(
        "--count", type=int, default=13, help="number of prompts, spread evenly over the file (default 13)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum new tokens per answer (default 64)")
    parser.add_argument(
        "--llm-name",
        default="",
        help="name of the LLM in the profile: that of the file passed to plan (default: the artifact's name)",
    )
    parser.add_argument(
        "--ssm-name",
        action="append",
        help="name of the SSM in the profile: that of the file or folder passed to plan; may be repeated (default ssm)",
    )
    parser.add_argument("-o", "--output", type=Path, help="write the profile to this file, NAME.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    from flexspec.cli.progress import progress_bars
    from flexspec.errors import ProfileError
    from flexspec.runtime.measure.acceptance import DRAFTS, PROMPTS, measure_acceptance, read_prompts

    if not args.acceptance:
        raise ProfileError("bench without --acceptance", "what to measure", "pass --acceptance")
    for name, most in (("count", 1_000_000), ("max_tokens", 1_000_000)):
        if not 1 <= getattr(args, name) <= most:
            option = "--" + name.replace("_", "-")
            raise ProfileError(f"{option} {getattr(args, name)}", f"1 to {most}", f"choose {option} in that range")
    path = args.prompts or PROMPTS
    prompts = read_prompts(path, args.count)
    with progress_bars() as progress:
        body = measure_acceptance(
            args.artifact,
            prompts,
            drafts=args.draft or DRAFTS,
            max_tokens=args.max_tokens,
            llm_name=args.llm_name,
            ssm_names=args.ssm_name or ("ssm",),
            source=path.name,
            note=lambda done, of: progress("answering", done, of),
        )
    text = json.dumps(body, indent=1) + "\n"
    if args.output:
        write_file(args.output, text)
    if args.json:
        print(text, end="")
        return 0
    print(f"{'tokens a round':>14s}  {'nodes':>5s}  {'rounds':>6s}  draft plan")
    for entry in body["entries"]:
        nodes = sum(entry["levels"])
        print(f"{entry['committed_tokens']:14.3f}  {nodes:5.1f}  {entry['rounds']:6d}  {entry['draft']}")
    if args.output:
        print(f"{args.output}: use it with flexspec plan --acceptance {args.output}")
    return 0
