"""The fixture that gives tests a real browser; docs/testbeds.md says what it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser
from testbed import selected


def pytest_configure(config: pytest.Config) -> None:
    selected.use(config)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made
