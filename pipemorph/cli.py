"""The ``pipemorph`` command: one subcommand per module of :mod:`pipemorph.commands`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from pipemorph import __version__
from pipemorph.errors import InputError

# Each module has ``add_parser(subparsers)`` and ``run(args) -> int``. One that is named on
# the command line is imported alone, so that `plan` does not pay for what `run` needs.
COMMANDS = {
    "advise": "pipemorph.commands.advise",
    "bench": "pipemorph.commands.bench",
    "doctor": "pipemorph.commands.doctor",
    "plan": "pipemorph.commands.plan",
    "run": "pipemorph.commands.run",
    "simulate": "pipemorph.commands.simulate",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 2 for input that cannot be used."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = [name for name in COMMANDS if arguments[:1] == [name]]
    parser = _Parser(
        prog="pipemorph",
        description="Pipeline-parallel training that stays fast when the network does not.",
    )
    parser.add_argument("--version", action="version", version=f"pipemorph {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {name: import_module(COMMANDS[name]) for name in named or COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        status = modules[args.command].run(args)
        sys.stdout.flush()
        return int(status)
    except InputError as error:
        print(f"pipemorph {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
