"""``flexspec calibrate X.fspec -o machine.toml``: measure this machine and write a machine file for ``plan``."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexspec.host.cores import usable_cores
from flexspec.host.files import write_file

EPILOG = """\
Steps of the artifact's LLM are timed on one core while the other cores run the same steps; links between processes
are timed with gloo (PyTorch). Memory is what the kernel reports, divided equally. Constants that cannot be measured are
copied from the shipped file cpu2, and their origin says so.

example:
  flexspec calibrate build/smollm2.fspec -o build/machine.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("artifact", type=Path, help="an artifact that runs on this machine, NAME.fspec")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the machine file to write, NAME.toml")
    parser.add_argument(
        "--ranks", type=int, default=usable_cores(), help="number of devices, one core each (default: all cores)"
    )
    parser.add_argument(
        "--no-links", action="store_true", help="use the shipped constants for links, which needs no PyTorch"
    )


def run(args: argparse.Namespace) -> int:
    from flexspec.compiler.prices.machine_writer import machine_toml
    from flexspec.errors import MachineError
    from flexspec.runtime.measure.calibrate import calibrate

    if not 1 <= args.ranks <= 256:
        raise MachineError(f"--ranks {args.ranks}", "1 to 256", "choose a number of cores")
    result = calibrate(args.artifact, args.output.stem, ranks=args.ranks, links=not args.no_links)
    write_file(args.output, machine_toml(result.machine, result.tables_origin))
    print("rows  predicted ms  measured ms  ratio")
    for rows, predicted_us, measured_us in result.steps.rows:
        print(f"{rows:4d}  {predicted_us / 1e3:12.2f}  {measured_us / 1e3:11.2f}  {predicted_us / measured_us:5.2f}")
    for name, constant in result.machine.constants():
        print(f"{name} = {constant.value:g} x {constant.correction:g}: {constant.origin}")
    print(f"{args.output}: use it with flexspec plan --machine {args.output}")
    return 0
