"""Fixtures and options of every test."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket

import pytest
from gate.hang_guard import HangGuard
from gate.processor_time import ProcessorTime
from gate.tiers import FULL, TEST, TIERS, tier_of
from hypothesis import HealthCheck, settings
from testbed import selected

# The time of an example depends on the machine.
settings.register_profile(
    "any machine", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
)
settings.register_profile(
    "repeatable", settings.get_profile("any machine"), derandomize=True, database=None
)
"""Profile of `make test`: a change shows no rare failing example of an unrelated part."""
settings.load_profile("any machine")

ASYNC_SECONDS = 100.0
_OMITTED = pytest.StashKey[int]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_engine") is not None:
        try:
            from pipemorph_trainer import _engine  # noqa: F401
        except ImportError as error:
            pytest.fail(f"the transfer engine is not built ({error}): `make setup`", pytrace=False)
    if item.get_closest_marker("ipv6") is not None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"::1 is no address of this machine ({error}): IPv6 is not checked")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own, for at most
    :data:`ASYNC_SECONDS`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames

    async def run() -> None:
        # A single task: some tests list all others.
        async with asyncio.timeout(ASYNC_SECONDS):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    asyncio.run(run())
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Children inherit ignored signals, and the tests of Ctrl-C and hang-up are about the
    default: a suite started with nohup or in the background must not decide them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(HangGuard(), "hang-guard")
    config.pluginmanager.register(ProcessorTime(), "processor-time")
    selected.use(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=sorted(TIERS),
        help="run the tests of this tier only; without it, all that the other arguments choose",
    )
    parser.addoption(
        "--may-be-empty", action="store_true", help="exit with 0 if no test was chosen, not with 5"
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.may_be_empty:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tier. Tests that need a GPU run where there is one; elsewhere they are neither run
    nor counted."""
    wanted = config.getoption("--tier")
    others = [item for item in items if tier_of(item) != wanted and wanted is not None]
    if others:
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)
    for item in items if wanted == TEST else ():
        if needed := selected.testbeds_of(item):
            raise pytest.UsageError(
                f"{item.nodeid} needs {', '.join(sorted(needed))}, but tests of the tier `{TEST}` "
                f"have no testbeds: mark it `{FULL}`"
            )
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_gpu:
        return
    import torch  # only those who test the trainer have it

    if torch.cuda.is_available():
        return
    items[:] = [item for item in items if item not in on_gpu]
    config.hook.pytest_deselected(items=on_gpu)
    config.stash[_OMITTED] = len(on_gpu)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    omitted = config.stash.get(_OMITTED, 0)
    if omitted:
        terminalreporter.write_line(
            f"{omitted} tests of CUDA were deselected: torch.cuda.is_available() is false "
            "here; on a machine with a GPU run `pytest -m gpu tests/trainer`",
            yellow=True,
        )
    skipped = os.environ.get("PIPEMORPH_TEST_SKIP")
    if skipped:
        terminalreporter.write_line(
            f"PIPEMORPH_TEST_SKIP={skipped}: somebody chose not to check what those tests check",
            yellow=True,
        )
