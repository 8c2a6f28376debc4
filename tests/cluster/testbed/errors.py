"""The one exception of the testbed itself, apart from what the API server answers."""


class TestbedError(Exception):
    """The testbed cannot do what was asked; the message says what to do about it."""

    __test__ = False  # the name is not that of a test class
