"""What every test starts from."""

from __future__ import annotations

import signal

import pytest

_LEFT_OUT = pytest.StashKey[int]()


def pytest_configure() -> None:
    """Children inherit ignored signals, and the tests of Ctrl-C and hang-up are about the
    default: a suite started with nohup or in the background must not decide them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU run where there is one. Elsewhere they are neither run nor counted."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_gpu:
        return
    import torch  # only those who test the trainer have it

    if torch.cuda.is_available():
        return
    items[:] = [item for item in items if item not in on_gpu]
    config.hook.pytest_deselected(items=on_gpu)
    config.stash[_LEFT_OUT] = len(on_gpu)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left_out = config.stash.get(_LEFT_OUT, 0)
    if left_out:
        terminalreporter.write_line(
            f"{left_out} tests of CUDA were left out: torch.cuda.is_available() is false here; "
            "on a machine with a GPU run `pytest -m gpu tests/trainer`",
            yellow=True,
        )
