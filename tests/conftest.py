"""What every test starts from."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Children inherit ignored signals, and the tests of Ctrl-C and hang-up are about the
    default: a suite started with nohup or in the background must not decide them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
