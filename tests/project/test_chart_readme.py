"""The chart's README names every value of ``values.yaml``, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts/pipemorph-operator"


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of values that hold no mapping, or an empty one."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield above + name, value


def rows() -> dict[str, str]:
    """Dotted name → default, of every row of the tables."""
    found: dict[str, str] = {}
    for line in (CHART / "README.md").read_text().splitlines():
        names, default, *_ = [cell.strip() for cell in line.strip("|").split(" | ")] + [""]
        if not line.startswith("| `"):
            continue
        each = re.findall(r"`([^`]+)`", names)
        defaults = re.findall(r"`([^`]+)`", default)
        if len(defaults) == 1:
            defaults *= len(each)
        for place, name in enumerate(each):
            found[name] = defaults[place] if len(defaults) == len(each) else ""
    return found


def test_every_value_has_a_row_and_its_default() -> None:
    values = dict(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    documented = rows()
    # A row may describe a whole mapping, such as resources, in words.
    covered = {
        name
        for name in values
        if any(name == row or name.startswith(f"{row}.") for row in documented)
    }
    assert set(values) == covered, "values without a row"
    known = [*values, *(name.rpartition(".")[0] for name in values)]
    unknown = {
        row for row in documented if not any(k == row or k.startswith(f"{row}.") for k in known)
    }
    assert not unknown, f"rows of values that do not exist: {unknown}"
    for name, default in documented.items():
        if name in values and default:
            assert yaml.safe_load(default) == values[name], f"default of {name}"
