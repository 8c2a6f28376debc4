"""Errors a user can act on."""


class PipeMorphError(Exception):
    """Base of every error this product raises on purpose."""


class InputError(PipeMorphError):
    """Input that cannot be used. The message is one line: found, expected, what to do.

    Commands print it and exit 2; it never becomes a traceback.
    """


def one_line(text: str, limit: int = 200) -> str:
    """``text`` for a message: one line, printable, and at most ``limit`` characters."""
    flat = "".join(c if c.isprintable() else " " for c in text)
    flat = " ".join(flat.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
