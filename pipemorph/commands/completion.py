"""``pipemorph completion SHELL``: a script that completes the command's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pipemorph.commands.output_file import write_output
from pipemorph.extras import missing_package_error

SHELLS = ("bash", "zsh", "fish")
FILES = ("FILE", "DIR", "PROBLEM", "PLAN", "TRACE", "JOB")
"""Metavars of arguments that may be file names."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a shell's completion script",
        description="Print a script that completes subcommands, options and file names. For bash:"
        ' eval "$(pipemorph completion bash)"; for zsh, write it to a file _pipemorph in a folder'
        " of $fpath; for fish, to ~/.config/fish/completions/pipemorph.fish. Exit status: 0, or 2"
        " for invalid input.",
    )
    parser.add_argument("shell", choices=SHELLS, help="shell to complete for")


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise missing_package_error("completion needs shtab", "completion") from None
    for action in _iterate_actions(args.parser):
        if action.metavar in FILES and action.choices is None:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    write_output((shtab.complete(args.parser, args.shell) + "\n").encode(), None)
    return 0


def _iterate_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of its subcommands. argparse has no public name for them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _iterate_actions(each)
        else:
            yield action
