"""Failures that no second run excuses.

A test that fails and then passes is *unstable*: a few of those do not fail ``make test``. But a
finding is not noise. A sanitizer's report, a mutant that lives and a result that differs in a bit
prove a defect once and for all, whatever a second run says. They are recognised by the text of the
failure, since many happen in child processes, of which text is all that comes back.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any


class AlwaysRed(AssertionError):
    """A failure that is proof. What counts is its name in the text of a traceback."""


@contextlib.contextmanager
def always_red() -> Iterator[None]:
    """Make each failed assertion inside final."""
    try:
        yield
    except AssertionError as error:
        raise AlwaysRed(str(error)) from error


def same_bits(found: Any, expected: Any, what: object = "result") -> None:
    """Fail for good unless both are the same: tensors to the bit, anything else by ``==``."""
    if hasattr(found, "dtype"):
        import torch  # few tests have tensors

        same = found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        same = found == expected
    if not same:
        raise AlwaysRed(f"{what}: found {found}, expected exactly {expected}")


_FINAL = {
    "a sanitizer's finding": re.compile(
        r"(?:ERROR|WARNING|SUMMARY): (?:\w+Sanitizer|libFuzzer)\b|:\d+:\d+: runtime error: "
    ),
    # With its module, as tracebacks name it and source lines that they quote do not.
    "a difference that is proof": re.compile(r"\bgate\.final\.AlwaysRed\b"),
}


def why_final(text: str) -> str | None:
    """Text that makes the failure final, or None if a second run may excuse it."""
    return next((why for why, pattern in _FINAL.items() if pattern.search(text)), None)
