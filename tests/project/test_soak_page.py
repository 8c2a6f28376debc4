"""tests/soak.md lists what ``make soak`` runs."""

import re
from pathlib import Path

import soak

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS / "soak.md").read_text()


def test_every_part_has_a_row() -> None:
    assert re.findall(r"^\| `(\w[\w ]*)` \|", PAGE, re.MULTILINE) == list(soak.PARTS)
