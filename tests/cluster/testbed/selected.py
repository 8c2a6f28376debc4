"""A pytest plugin: ends a session at its start if a testbed that its tests need is not ready.

A test needs the testbeds of its markers and fixtures, and those that its module names in
`TESTBEDS`, a tuple of names. Tests only look for testbeds: `make testbeds` builds them.
"""

import os
from collections.abc import Iterable

import pytest

from testbed import catalog
from testbed.errors import TestbedError

SKIP = "PIPEMORPH_TEST_SKIP"
LEVELS = ("cluster", "node", "rdma", "browser")

_OF_MARKERS = {"cluster": "api", "node": "nodes", "kueue": "kueue", "rdma": "guests"}
_OF_FIXTURES = {"project_archives": "images", "browser": "browser"}
# The words of `SKIP`; tests that need one of these testbeds are then skipped.
_OF_LEVELS = {
    "cluster": {"api", "nodes", "images", "kueue", "prometheus"},
    "node": {"nodes", "images"},
    "rdma": {"guests"},
    "browser": {"browser"},
}


def use(config: pytest.Config) -> None:
    """Register the plugin, once for all folders of tests."""
    if not config.pluginmanager.has_plugin("testbeds"):
        config.pluginmanager.register(_Plugin(), "testbeds")


class _Plugin:
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly or session.testsfailed:
            return
        try:
            catalog.check(sorted(needed(session.items)))
        except TestbedError as error:
            # A single red line, and no test runs.
            raise pytest.UsageError(str(error)) from None

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if level := skipped_level(item):
            pytest.skip(f"{SKIP} names {level}: what this test checks is not checked")


def needed(items: Iterable[pytest.Item]) -> set[str]:
    """The testbeds of all tests that are not skipped."""
    return {name for item in items if skipped_level(item) is None for name in testbeds_of(item)}


def testbeds_of(item: pytest.Item) -> set[str]:
    """The testbeds that a test needs."""
    fixtures = getattr(item, "fixturenames", ())
    return {
        *(name for marker, name in _OF_MARKERS.items() if item.get_closest_marker(marker)),
        *(name for fixture, name in _OF_FIXTURES.items() if fixture in fixtures),
        *getattr(getattr(item, "module", None), "TESTBEDS", ()),
    }


def skipped_level(item: pytest.Item) -> str | None:
    """The level of a test that a developer chose to skip, or None."""
    wanted = testbeds_of(item)
    return next((level for level in sorted(skipped_levels()) if _OF_LEVELS[level] & wanted), None)


def skipped_levels() -> set[str]:
    """The levels that somebody at a desk chose to do without; CI must not set this."""
    words = set(os.environ.get(SKIP, "").replace(",", " ").split())
    if words - set(LEVELS):
        raise pytest.UsageError(f"{SKIP}={os.environ[SKIP]}: expected some of {', '.join(LEVELS)}")
    return words | ({"node"} if "cluster" in words else set())
