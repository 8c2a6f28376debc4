"""Exception of the testbed itself, apart from answers of the API server."""


class TestbedError(Exception):
    """The testbed cannot do what was requested; the message says what to do about it."""

    __test__ = False  # the name is not that of a test class
