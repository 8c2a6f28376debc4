"""tests/soak.md says what ``make soak`` runs."""

import re
from pathlib import Path

import soak

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS / "soak.md").read_text()


def test_every_part_has_a_row() -> None:
    assert re.findall(r"^\| `(\w[\w ]*)` \|", PAGE, re.MULTILINE) == list(soak.PARTS)


def test_every_file_with_long_tests_is_named() -> None:
    """But for those of a part of their own."""
    marked = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("test_*.py")
        if "pytest.mark.soak" in path.read_text() and path != Path(__file__)
    }
    # What tests the gate has the mark in a text.
    of_no_part = marked - {soak.FAULTS.removeprefix("tests/"), "project/test_gate.py"}
    assert set(re.findall(r"`([\w/]+/test_\w+\.py)`", PAGE)) == of_no_part
