"""The ``pipemorph`` command: one subcommand per module of :mod:`pipemorph.commands`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from pipemorph import __version__
from pipemorph.errors import InputError, one_line
from pipemorph.removed import ARGUMENTS, removal
from pipemorph.removed import COMMANDS as REMOVED_COMMANDS
from pipemorph.streams import open_closed, silence

# Each module has ``add_parser(subparsers)`` and ``run(args) -> int``. Only the module of the given
# subcommand is imported, so that `plan` does not load the imports of `run`.
COMMANDS = {
    "advise": "pipemorph.commands.advise",
    "bench": "pipemorph.commands.bench",
    "completion": "pipemorph.commands.completion",
    "doctor": "pipemorph.commands.doctor",
    "explain": "pipemorph.commands.explain",
    "fabric": "pipemorph.commands.fabric",
    "plan": "pipemorph.commands.plan",
    "replay": "pipemorph.commands.replay",
    "run": "pipemorph.commands.run",
    "serve": "pipemorph.commands.serve",
    "simulate": "pipemorph.commands.simulate",
    "timeline": "pipemorph.commands.cluster.timeline",
    "top": "pipemorph.commands.cluster.top",
    "watch": "pipemorph.commands.cluster.watch",
}


MOST = 1000
"""Longest error message, characters."""


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, like all other errors of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message, MOST)} (see {self.prog} --help)\n")


def kubectl_plugin() -> int:
    """``kubectl pipemorph``: kubectl runs the program ``kubectl-pipemorph`` for it."""
    return main(prog="kubectl pipemorph")


def main(argv: Sequence[str] | None = None, prog: str = "pipemorph") -> int:
    """Run one subcommand. Returns the exit status: 2 for invalid input. ``prog``: how the user
    calls it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_closed()
    if sys.stdout is None:
        print(f"{prog}: standard output is closed; redirect it to /dev/null", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names and messages of ranks may contain characters outside the locale's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(arguments, prog)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str], prog: str) -> int:
    if gone := _removed(arguments):
        print(f"{prog} {gone}", file=sys.stderr)
        return 2
    named = [name for name in COMMANDS if arguments[:1] == [name]]
    parser = _parser(COMMANDS if named in ([], ["completion"]) else named, prog)
    args = parser.parse_args(arguments)
    try:
        status = import_module(COMMANDS[args.command]).run(args)
        sys.stdout.flush()
        return int(status)
    except InputError as error:
        print(f"{prog} {args.command}: {one_line(str(error), MOST)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe.
        silence(sys.stdout)
        return 1


def _removed(arguments: Sequence[str]) -> str | None:
    """The message that refuses a removed command or argument, if one is used."""
    for length in (1, 2):
        command = " ".join(arguments[:length])
        if gone := removal(REMOVED_COMMANDS, command):
            return f"{command}: {gone}"
    for argument in arguments[1 : _end_of_options(arguments)]:
        name = f"{arguments[0]} {argument.partition('=')[0]}"
        if gone := removal(ARGUMENTS, name):
            return f"{name}: {gone}"
    return None


def _end_of_options(arguments: Sequence[str]) -> int:
    """Index of ``--``, after which a user's own command begins; their number without one."""
    return arguments.index("--") if "--" in arguments else len(arguments)


def _parser(commands: Iterable[str], prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Pipeline-parallel training that adapts its schedule to slow links.",
    )
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    # For `completion`, which completes all subcommands.
    parser.set_defaults(parser=parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in commands:
        import_module(COMMANDS[name]).add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
