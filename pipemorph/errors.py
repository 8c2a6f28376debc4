"""Errors a user can act on."""


class PipeMorphError(Exception):
    """Base of every error this product raises on purpose."""


class InputError(PipeMorphError):
    """Input that cannot be used. The message is one line: found, expected, what to do.

    Commands print it and exit 2; it never becomes a traceback.
    """
