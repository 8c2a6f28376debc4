"""Base classes of the errors that are meant for users."""


class PipeMorphError(Exception):
    """Base class of all errors that PipeMorph raises deliberately."""


class InputError(PipeMorphError):
    """Invalid input. The message is one line: value found, value expected, what to do.

    Commands print it without a traceback and exit with status 2.
    """


class ObjectNotFoundError(InputError):
    """The named object, such as a job, does not exist."""


def one_line(text: str, limit: int = 200) -> str:
    """Make ``text`` one printable line of at most ``limit`` characters, for messages."""
    return printable_line(" ".join(printable_line(text, len(text)).split()), limit)


def printable_line(text: str, limit: int) -> str:
    """Replace unprintable characters of ``text``, such as line breaks and terminal controls, by
    spaces, and cut it after ``limit`` characters."""
    flat = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return flat if len(text) <= limit else flat[: limit - 1] + "…"
