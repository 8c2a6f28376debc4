"""The ``pipemorph`` command: one subcommand per module of :mod:`pipemorph.commands`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from pipemorph import __version__
from pipemorph.commands.emit import silence_stdout
from pipemorph.errors import InputError, one_line

# Each module has ``add_parser(subparsers)`` and ``run(args) -> int``. Only the module of the given
# subcommand is imported, so that `plan` does not load the imports of `run`.
COMMANDS = {
    "advise": "pipemorph.commands.advise",
    "bench": "pipemorph.commands.bench",
    "doctor": "pipemorph.commands.doctor",
    "explain": "pipemorph.commands.explain",
    "fabric": "pipemorph.commands.fabric",
    "plan": "pipemorph.commands.plan",
    "replay": "pipemorph.commands.replay",
    "run": "pipemorph.commands.run",
    "serve": "pipemorph.commands.serve",
    "simulate": "pipemorph.commands.simulate",
}


MOST = 1000
"""Longest error message, characters."""


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, like all other errors of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message, MOST)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 2 for invalid input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        print("pipemorph: standard output is closed; redirect it to /dev/null", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names and messages of ranks may contain characters outside the locale's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    named = [name for name in COMMANDS if arguments[:1] == [name]]
    parser = _Parser(
        prog="pipemorph",
        description="Pipeline-parallel training that adapts its schedule to slow links.",
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
        print(f"pipemorph {args.command}: {one_line(str(error), MOST)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe.
        silence_stdout()
        return 1


if __name__ == "__main__":
    sys.exit(main())
