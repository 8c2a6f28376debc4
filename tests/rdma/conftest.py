"""The fixture that gives tests real verbs; docs/testbeds.md lists its requirements.

`fabric`: two guests with two Soft-RoCE devices each, booted once for all tests.
`launchers`: a process with torch in each of them, for all tests that need one.

Soft-RoCE's driver can panic a guest's kernel when a device goes down with packets on their way.
That fails the test it happens in; the next one finds new guests.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from guests import Fabric
from launchers import Launchers
from testbed import TestbedError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time for the boot, which the first test of a run is charged with."""
    for item in items:
        if item.get_closest_marker("rdma") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


def _teller(config: pytest.Config) -> Callable[[str], None]:
    capture = config.pluginmanager.get_plugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\nrdma guests: {text}", flush=True)

    return say


class Guests:
    """Guests of all tests, and their programs that start once."""

    def __init__(self, config: pytest.Config) -> None:
        self._say = _teller(config)
        self._stack = ExitStack()
        self._fabric: Fabric | None = None
        self._launchers: Launchers | None = None

    def fabric(self) -> Fabric:
        """Running guests: the present ones, or new ones if one of those has died."""
        if self._fabric is not None and not self._fabric.running:
            self._say("a guest has died, see the test before; booting new ones")
            self.stop()
        if self._fabric is None:
            self._fabric = self._stack.enter_context(Fabric.started())
        return self._fabric

    def launchers(self) -> Launchers:
        fabric = self.fabric()
        if self._launchers is None:
            self._launchers = Launchers(fabric)
        return self._launchers

    def stop(self) -> None:
        # Programs in the guests end with them.
        self._fabric = self._launchers = None
        self._stack.close()


@pytest.fixture(scope="session")
def guests(request: pytest.FixtureRequest) -> Iterator[Guests]:
    made = Guests(request.config)
    yield made
    made.stop()


@pytest.fixture
def fabric(guests: Guests) -> Fabric:
    try:
        return guests.fabric()
    except TestbedError as error:
        pytest.fail(f"no RDMA guests: {error}", pytrace=False)


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
