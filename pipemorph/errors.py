"""Base classes of the errors that are meant for users."""


class PipeMorphError(Exception):
    """Base class of all errors that PipeMorph raises deliberately."""


class InputError(PipeMorphError):
    """Invalid input. The message is one line: value found, value expected, what to do.

    Commands print it without a traceback and exit with status 2.
    """


def one_line(text: str, limit: int = 200) -> str:
    """``text`` as one printable line of at most ``limit`` characters, for messages."""
    flat = "".join(c if c.isprintable() else " " for c in text)
    flat = " ".join(flat.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
