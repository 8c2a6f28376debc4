"""The fixture that gives tests real verbs; docs/testbeds.md says what it needs.

`fabric`: two guests with two Soft-RoCE devices each, booted once for all tests.
`launchers`: a process with torch in each of them, for all tests that need one.
"""

import os
from collections.abc import Callable, Iterator

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


@pytest.fixture(scope="session")
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    if _skipped():
        pytest.skip(f"{SKIP} names rdma: what this test checks is not checked")
    try:
        if MISSING in request.config.stash:
            raise TestbedError(request.config.stash[MISSING])
        with Fabric.started(_teller(request.config)) as made:
            yield made
    except TestbedError as error:
        pytest.fail(
            f"no RDMA guests here: {error}\n(on a machine that cannot have them, run with "
            f"{SKIP}=rdma: these tests are then reported as skipped)",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def launchers(fabric: Fabric) -> Iterator[Launchers]:
    made = Launchers(fabric)
    yield made
    made.kill()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the guests' consoles to the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    found = getattr(item, "funcargs", {}).get("fabric")
    if report.failed and isinstance(found, Fabric):
        report.sections.append(("guests", found.logs()))
