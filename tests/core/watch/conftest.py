"""The fixture that gives tests a real browser; docs/testbeds.md says what it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from browser import Browser, browser_program
from testbed import TestbedError

SKIP = "PIPEMORPH_TEST_SKIP"
MISSING = pytest.StashKey[str]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Install what is missing before the first test, which has a time limit."""
    if session.config.option.collectonly or session.testsfailed or _skipped():
        return
    if not any("browser" in getattr(item, "fixturenames", ()) for item in session.items):
        return
    capture = session.config.pluginmanager.get_plugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\nbrowser: {text}", flush=True)

    try:
        browser_program(say)
    except TestbedError as error:
        # Reported by each test that needs it, as its own failure.
        session.config.stash[MISSING] = str(error)


def _skipped() -> bool:
    return "browser" in os.environ.get(SKIP, "").replace(",", " ").split()


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    if _skipped():
        pytest.skip(f"{SKIP} names browser: the live page is not looked at")
    missing = request.config.stash.get(MISSING, "")
    if missing:
        pytest.fail(f"no browser to look at the live page with: {missing}", pytrace=False)
    with Browser() as made:
        yield made
