"""Runs a training script while its pipelines are observed.

torchrun --nproc-per-node 4 -m pipemorph_trainer.observe train.py ARGUMENTS
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from pipemorph_trainer.observe import observe


def main(arguments: list[str]) -> int:
    """Run the script of the command line. Returns 2 if there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m pipemorph_trainer.observe",
        description="Run a training script, and record the ops of its pipelines.",
        epilog="Then: pipemorph diagnose FOLDER",
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder of the op tables; default: ops")
    parser.add_argument(
        "--site",
        action="store_true",
        help="print a folder for PYTHONPATH that observes unchanged commands whose environment has "
        "PIPEMORPH_OBSERVE=FOLDER, and exit",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args(arguments)
    if args.site:
        print(Path(__file__).parent / "site")
        return 0
    if args.script is None:
        parser.error("SCRIPT is missing; give the training script and its arguments")
    if not args.is_module and not Path(args.script).is_file():
        parser.error(f"{args.script}: no such file; give the path of the training script")
    observe(args.out)
    sys.argv = [args.script, *args.arguments]
    if args.is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(args.script).resolve().parent)
        runpy.run_path(args.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
