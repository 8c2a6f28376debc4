"""The files with which ranks of another launcher prove that they belong to a job."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from pipemorph.document import named, read_text
from pipemorph.errors import InputError

MOST_BYTES = 4096


def kept_secret(path: Path, what: str) -> str:
    """The secret in a file, without white space around it. If there is no such file, it is made,
    with a new random secret and mode 0600.

    ``what``: the option that names the file. Raises :class:`InputError` if the file is empty, can
    be read by other users, or cannot be read or made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return existing_secret(path, what)
    except (OSError, ValueError) as error:
        # ValueError: a zero byte in the name.
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{what} {named(path)} cannot be made: {why}") from None
    text = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
    return text


def existing_secret(path: Path, what: str) -> str:
    """The same, of a file that must be there."""
    text = read_text(path, MOST_BYTES).strip()
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InputError(
            f"{what} {named(path)} can be read by other users (mode {mode:04o}); chmod 600 it"
        )
    if not text or not text.isascii() or not text.isprintable():
        raise InputError(
            f"{what} {named(path)} holds no secret; expected one line of printable ASCII"
        )
    return text
