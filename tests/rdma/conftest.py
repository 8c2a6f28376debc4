"""The fixture that gives tests real verbs; docs/testbeds.md says what it needs.

`fabric`: two guests with two Soft-RoCE devices each, booted once for all tests.
`launchers`: a process with torch in each of them, for all tests that need one.

Soft-RoCE's driver can panic a guest's kernel when a device goes down with packets on their way.
That fails the test it happens in; the next one finds new guests.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from guests import Fabric, fetched, missing_for_guests
from launchers import Launchers
from testbed import TestbedError

SKIP = "PIPEMORPH_TEST_SKIP"
MISSING = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time for the boot, which the first test of a run is charged with."""
    for item in items:
        if item.get_closest_marker("rdma") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Install and fetch what is missing before the first test, which has a time limit."""
    if session.config.option.collectonly or session.testsfailed or _skipped():
        return
    if not any(item.get_closest_marker("rdma") for item in session.items):
        return
    say = _teller(session.config)
    try:
        missing_for_guests(say)
        fetched(say)
    except TestbedError as error:
        # Reported by each test that needs it, as its own failure.
        session.config.stash[MISSING] = str(error)


def _skipped() -> bool:
    return "rdma" in os.environ.get(SKIP, "").replace(",", " ").split()


def _teller(config: pytest.Config) -> Callable[[str], None]:
    capture = config.pluginmanager.get_plugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\nrdma guests: {text}", flush=True)

    return say


class Guests:
    """The guests of all tests, and what was started in them once."""

    def __init__(self, config: pytest.Config) -> None:
        self._say = _teller(config)
        self._stack = ExitStack()
        self._fabric: Fabric | None = None
        self._launchers: Launchers | None = None

    def fabric(self) -> Fabric:
        """Guests that run: the ones that are there, or new ones if one of those has died."""
        if self._fabric is not None and not self._fabric.running:
            self._say("a guest has died, see the test before; booting new ones")
            self.stop()
        if self._fabric is None:
            self._fabric = self._stack.enter_context(Fabric.started(self._say))
        return self._fabric

    def launchers(self) -> Launchers:
        fabric = self.fabric()
        if self._launchers is None:
            self._launchers = Launchers(fabric)
        return self._launchers

    def stop(self) -> None:
        # What runs in the guests ends with them.
        self._fabric = self._launchers = None
        self._stack.close()


@pytest.fixture(scope="session")
def guests(request: pytest.FixtureRequest) -> Iterator[Guests]:
    if _skipped():
        pytest.skip(f"{SKIP} names rdma: what this test checks is not checked")
    made = Guests(request.config)
    yield made
    made.stop()


@pytest.fixture
def fabric(request: pytest.FixtureRequest, guests: Guests) -> Fabric:
    try:
        if MISSING in request.config.stash:
            raise TestbedError(request.config.stash[MISSING])
        return guests.fabric()
    except TestbedError as error:
        pytest.fail(
            f"no RDMA guests here: {error}\n(on a machine that cannot have them, run with "
            f"{SKIP}=rdma: these tests are then reported as skipped)",
            pytrace=False,
        )


@pytest.fixture
def launchers(fabric: Fabric, guests: Guests) -> Launchers:
    return guests.launchers()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the guests' consoles to the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    found = getattr(item, "funcargs", {}).get("fabric")
    if report.failed and isinstance(found, Fabric):
        report.sections.append(("guests", found.logs()))
