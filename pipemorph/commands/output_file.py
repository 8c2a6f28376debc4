"""Output of a command: its arguments, and the writing to a file or to stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipemorph.errors import InputError, one_line
from pipemorph.standard_streams import silence_stream

# Formats by the extension of --out.
ENDINGS = {
    ".json": "json",
    ".txt": "text",
    ".html": "html",
    ".htm": "html",
    ".png": "png",
    ".svg": "svg",
    ".csv": "csv",
}


def add_output_arguments(
    parser: argparse.ArgumentParser, formats: Sequence[str], default: str, more: str = ""
) -> None:
    """Add ``--output`` and ``--out``. ``more``: further text on the formats."""
    text = f"format (default: by the extension of FILE, else {default}){more}"
    parser.add_argument("--output", choices=formats, help=text)
    parser.add_argument("--out", metavar="FILE", help="write to FILE, not to stdout")


def choose_output_format(args: argparse.Namespace, formats: Sequence[str], default: str) -> str:
    """The format, one of ``formats``: ``--output``, else by the extension of ``--out``, else the
    default. Raises :class:`InputError` for another extension."""
    if args.output is not None:
        return str(args.output)
    extension = Path(args.out or "").suffix.lower()
    found = ENDINGS.get(extension, "") if extension else default
    if found not in formats:
        known = ", ".join(each for each, name in ENDINGS.items() if name in formats)
        raise InputError(
            f"--out: {one_line(args.out)} is no format of this command; use one of {known}, or"
            " give --output"
        )
    return found


def print_progress(text: str) -> None:
    """Print what a command does, for a person who waits: on standard error, if it is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def write_output(data: bytes, out: str | None, summary: str = "") -> None:
    """Write ``data`` to the file ``out``, and print that with a ``summary``; None: to stdout.

    Raises :class:`InputError` if the write fails, BrokenPipeError if stdout's reader has closed it.
    """
    if out is None:
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            silence_stream(sys.stdout)
            raise InputError(f"cannot write standard output: {error.strerror}") from None
        return
    if not out:
        raise InputError("--out is empty; name a file")
    try:
        Path(out).write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {one_line(out)}: {error.strerror}") from None
    print_progress(f"wrote {one_line(out)}{': ' if summary else ''}{summary}")
