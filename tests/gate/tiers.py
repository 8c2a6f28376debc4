"""The tier of each test: which command runs it first.

A test is in the tier that its closest marker names, else in that of its folder, else in
:data:`TEST`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TEST, FULL, TIMES, SOAK = "test", "full", "times", "soak"
TIERS = {
    TEST: "`make test`: no testbed, about two processor seconds, nothing that a clock decides",
    FULL: "`make test-all`: needs a testbed, many processes, or many seconds",
    TIMES: "`make test-times`: compares times, so it has the machine to itself",
    SOAK: "`make soak`: takes longer than it adds to each run",
}
FULL_FOLDERS = ("cluster", "rdma")
"""The folders of the testbeds, below ``tests``."""


def tier_of(item: pytest.Item) -> str:
    """The tier of a test. Raises UsageError if one function or one file names two."""
    for node in reversed(item.listchain()):
        named = {mark.name for mark in node.own_markers} & TIERS.keys()
        if len(named) > 1:
            raise pytest.UsageError(
                f"{node.nodeid} is marked {' and '.join(sorted(named))}; a test has one tier: "
                "keep one of them"
            )
        if named:
            return named.pop()
    if item.path.is_relative_to(TESTS):
        folder, *_ = item.path.relative_to(TESTS).parts
        if folder in FULL_FOLDERS:
            return FULL
    return TEST
