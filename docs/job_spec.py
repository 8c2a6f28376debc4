"""Writes the tables of docs/reference/job-spec*.md from the job's models.

Run ``python docs/job_spec.py`` after a change of ``pipemorph/spec``; a test compares the pages.
The tables stand between ``<!-- fields: PATH -->`` and ``<!-- end -->``; the rest stays. The table
has the first sentence of a long description, a list below it the others.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipemorph.removed import FIELDS
from pipemorph_operator.crd.generate import build_job_definition

PAGES = sorted((Path(__file__).parent / "reference").glob("job-spec*.md"))
TABLE = re.compile(r"(<!-- fields: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = "| field | type | default | meaning |\n|---|---|---|---|\n"
OPAQUE = "template"
"""A pod template is Kubernetes' own; its fields are not described here."""

LONG = 110
"""Longest description in a cell, characters."""
WIDTH = 118
"""Longest line of a list, characters."""

Schema = dict[str, Any]
Field = tuple[str, Schema, bool]
"""Name, schema, and whether the field is required."""


def page(text: str) -> str:
    """``text`` with every table made anew. Raises ``KeyError`` for a field that is none."""
    version = build_job_definition()["spec"]["versions"][0]
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
    found = list(fields(node.get("items", node), "", sections=where != "spec"))
    listed = "".join(rest(name, field) for name, field, _ in found)
    return "\n" + HEAD + "".join(map(row, found)) + "\n" + (listed + "\n" if listed else "")


def fields(node: Schema, above: str, *, sections: bool = True) -> Iterator[Field]:
    required = node.get("required", ())
    for name, field in node["properties"].items():
        inner = field.get("items", field)
        nested = "properties" in inner and name != OPAQUE
        if nested and not sections:
            continue
        if not nested or "description" in field:
            yield above + name, field, name in required
        if nested:
            mark = "[]" if inner is not field else ""
            yield from fields(inner, f"{above}{name}{mark}.")


def row(given: Field) -> str:
    name, field, required = given
    default = "**required**" if required else ""
    if "default" in field and field["default"] not in ({}, []):
        default = f"`{shown(field['default'])}`"
    cells = (f"`{name}`", kind(field), default, sentences(field)[0])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def rest(name: str, field: Schema) -> str:
    """The sentences of a description that are not in its row, as an entry of a list."""
    text = sentences(field)[1]
    if not text:
        return ""
    return (
        textwrap.fill(
            f"`{name}`: {text}",
            WIDTH,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def sentences(field: Schema) -> tuple[str, str]:
    """The description for the row, and for the list below the table."""
    text = field.get("description", "")
    if len(text) <= LONG:
        return text, ""
    first, *others = re.split(r"(?<=\.) ", text, maxsplit=1)
    return first, " ".join(others)


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
    for path in PAGES:
        path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
