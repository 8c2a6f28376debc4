"""Writes the tables of docs/job-spec.md from the job's models.

Run ``python docs/job_spec.py`` after a change of ``pipemorph/api``; a test holds the page to it.
The tables stand between ``<!-- fields: PATH -->`` and ``<!-- end -->``; the rest is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipemorph.removed import FIELDS
from pipemorph_operator.crd.generate import job_definition

PAGE = Path(__file__).with_name("job-spec.md")
TABLE = re.compile(r"(<!-- fields: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = "| field | type | default | meaning |\n|---|---|---|---|\n"
OPAQUE = "template"
"""A pod template is Kubernetes' own; its fields are not described here."""

Schema = dict[str, Any]


def page(text: str) -> str:
    """``text`` with every table made anew. Raises ``KeyError`` for a field that is none."""
    version = job_definition()["spec"]["versions"][0]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for removed in FIELDS:
        *above, name = removed.split(".")[1:]
        node = spec
        for each in above:
            node = node["properties"][each]
            node = node.get("items", node)
        del node["properties"][name]
    return TABLE.sub(lambda found: found[1] + table(spec, found[2]) + found[3], text)


def table(spec: Schema, where: str) -> str:
    """The fields below ``where`` (as ``spec.schedule``); of ``spec`` itself, those that are no
    section of their own."""
    node = spec
    for name in where.split(".")[1:]:
        node = node["properties"][name]
    found = rows(node.get("items", node), "", sections=where != "spec")
    return "\n" + HEAD + "".join(found) + "\n"


def rows(node: Schema, above: str, *, sections: bool = True) -> Iterator[str]:
    required = node.get("required", ())
    for name, field in node["properties"].items():
        inner = field.get("items", field)
        nested = "properties" in inner and name != OPAQUE
        if nested and not sections:
            continue
        if nested:
            mark = "[]" if inner is not field else ""
            if "description" in field:
                yield row(above + name, field, name in required)
            yield from rows(inner, f"{above}{name}{mark}.")
        else:
            yield row(above + name, field, name in required)


def row(name: str, field: Schema, required: bool) -> str:
    default = "**required**" if required else ""
    if "default" in field and field["default"] not in ({}, []):
        default = f"`{shown(field['default'])}`"
    cells = (f"`{name}`", kind(field), default, field.get("description", ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def shown(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)


def kind(field: Schema) -> str:
    """Type and bounds of a field, as people write them."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {kind(field['items'])}"
    if "type" not in field:
        return "integer, or list of integers"
    name = "map" if field["type"] == "object" else str(field["type"])
    low, high = field.get("minimum"), field.get("maximum")
    bounds = []
    if low is not None:
        bounds.append(f"{'>' if field.get('exclusiveMinimum') else '≥'} {low:,}")
    if high is not None:
        bounds.append(f"{'<' if field.get('exclusiveMaximum') else '≤'} {high:,}")
    return ", ".join([name, *bounds])


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
