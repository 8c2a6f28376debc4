"""Command ``pipemorph``, with a subcommand per module of :mod:`pipemorph.commands`."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from pipemorph import __version__
from pipemorph.errors import InputError, one_line
from pipemorph.removed import ARGUMENTS, describe_removal
from pipemorph.removed import COMMANDS as REMOVED_COMMANDS
from pipemorph.standard_streams import open_closed_streams, silence_stream

# Each module has ``add_parser(subparsers)`` and ``run(args) -> int``. Only the module of the given
# subcommand is imported, so `plan` does not load the imports of `run`.
COMMAND_GROUPS = {
    "train": {
        "init": "pipemorph.commands.manifest.init",
        "run": "pipemorph.commands.run",
        "serve": "pipemorph.commands.serve",
    },
    "what a job did": {
        "view": "pipemorph.commands.results.view",
        "explain": "pipemorph.commands.results.explain",
        "diagnose": "pipemorph.commands.diagnose",
    },
    "without a job": {
        "plan": "pipemorph.commands.plan",
        "simulate": "pipemorph.commands.simulate",
        "advise": "pipemorph.commands.advise",
        "replay": "pipemorph.commands.replay",
        "reproduce": "pipemorph.commands.reproduce",
    },
    "this machine": {
        "doctor": "pipemorph.commands.doctor",
        "bench": "pipemorph.commands.bench",
    },
    "jobs of a cluster": {
        "top": "pipemorph.commands.cluster.top",
        "watch": "pipemorph.commands.cluster.watch",
        "timeline": "pipemorph.commands.cluster.timeline",
    },
    "editor and shell": {
        "schema": "pipemorph.commands.manifest.schema",
        "completion": "pipemorph.commands.completion",
    },
}
"""Modules of subcommands by heading of the help, in its order."""

COMMANDS = {name: module for group in COMMAND_GROUPS.values() for name, module in group.items()}

PLUGIN = "kubectl pipemorph"
PLUGIN_COMMANDS = ("explain", *COMMAND_GROUPS["jobs of a cluster"])
"""Commands of the kubectl plugin: those that read jobs of a cluster."""

LAUNCHING_COMMANDS = ("serve",)
"""Commands that start the program after ``--``."""

MOST = 1000
"""Longest error message, characters."""


class _CommandParser(argparse.ArgumentParser):
    """Parser that reports errors in one line, like all other errors of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message, MOST)} (see {self.prog} --help)\n")

    def format_help(self) -> str:
        """Text of the help. Those of all commands have a heading above each group."""
        text = super().format_help()
        if " " in self.prog:
            return text
        for heading, commands in COMMAND_GROUPS.items():
            listed = rf"^    (?={next(iter(commands))}\s)"
            text = re.sub(listed, f"\n  {heading}:\n    ", text, flags=re.MULTILINE)
        return text


def run_kubectl_plugin() -> int:
    """Run ``kubectl pipemorph``, for which kubectl starts the program ``kubectl-pipemorph``."""
    return main(prog=PLUGIN)


def main(argv: Sequence[str] | None = None, prog: str = "pipemorph") -> int:
    """Run a subcommand. Returns the exit status: 2 for invalid input. ``prog``: name of the command
    for messages."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_closed_streams()
    if sys.stdout is None:
        print(f"{prog}: standard output is closed; redirect it to /dev/null", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names and messages of ranks may contain characters outside the locale's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run_subcommand(arguments, prog)
    except KeyboardInterrupt:
        return 130


def _run_subcommand(arguments: list[str], prog: str) -> int:
    if gone := _find_removal_message(arguments):
        print(f"{prog} {gone}", file=sys.stderr)
        return 2
    if prog == PLUGIN and arguments[:1] and arguments[0] in COMMANDS.keys() - PLUGIN_COMMANDS:
        print(
            f"{prog} {arguments[0]}: reads no job of a cluster; use pipemorph {arguments[0]}",
            file=sys.stderr,
        )
        return 2
    args = parse_arguments(arguments, prog)
    try:
        status = import_module(COMMANDS[args.command]).run(args)
        sys.stdout.flush()
        return int(status)
    except InputError as error:
        print(f"{prog} {args.command}: {one_line(str(error), MOST)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe.
        silence_stream(sys.stdout)
        return 1


def parse_arguments(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """The parsed arguments. ``launch``: those after ``--``, of a command that starts a program."""
    named = [name for name in COMMANDS if arguments[:1] == [name]]
    every = PLUGIN_COMMANDS if prog == PLUGIN else COMMANDS
    parser = _build_parser(every if named in ([], ["completion"]) else named, prog)
    end = len(arguments)
    if arguments[:1] and arguments[0] in LAUNCHING_COMMANDS:
        end = _find_end_of_options(arguments)
    args = parser.parse_args(arguments[:end])
    args.launch = list(arguments[end + 1 :])
    return args


def _find_removal_message(arguments: Sequence[str]) -> str | None:
    """Message for a removed command or argument; None if none is used."""
    for length in (1, 2):
        command = " ".join(arguments[:length])
        if gone := describe_removal(REMOVED_COMMANDS, command):
            return f"{command}: {gone}"
    for argument in arguments[1 : _find_end_of_options(arguments)]:
        name = f"{arguments[0]} {argument.partition('=')[0]}"
        if gone := describe_removal(ARGUMENTS, name):
            return f"{name}: {gone}"
    return None


def _find_end_of_options(arguments: Sequence[str]) -> int:
    """Index of ``--``, after which a user's command begins; the number of arguments without it."""
    return arguments.index("--") if "--" in arguments else len(arguments)


def _build_parser(commands: Iterable[str], prog: str) -> argparse.ArgumentParser:
    parser = _CommandParser(
        prog=prog,
        description="Pipeline-parallel training that adapts its schedule to slow links.",
    )
    if prog == PLUGIN:
        parser.epilog = (
            "All other commands are those of the program pipemorph: see pipemorph --help."
        )
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    # `completion` needs it, to complete all subcommands.
    parser.set_defaults(parser=parser)
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name in commands:
        import_module(COMMANDS[name]).add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
