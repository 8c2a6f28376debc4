"""``pipemorph schema``: prints the JSON Schema of the manifest, for editors."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pipemorph.commands.output_file import write_output
from pipemorph.spec.job_spec import PipeMorphJob

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "schema",
        help="print the JSON Schema of a manifest, for editors",
        description="Print the JSON Schema of a PipeMorphJob. An editor with yaml-language-server "
        "completes and checks a manifest that begins with '# yaml-language-server: $schema=FILE'. "
        "The schema checks single fields; pipemorph run checks them together, too.",
    )
    parser.add_argument("--out", metavar="FILE", help="write to FILE, not to stdout")


def run(args: argparse.Namespace) -> int:
    text = json.dumps(build_schema(), indent=1, ensure_ascii=False) + "\n"
    write_output(text.encode(), args.out)
    return 0


def build_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest."""
    schema = PipeMorphJob.model_json_schema(by_alias=True)
    _drop_titles(schema)
    return {"$schema": DIALECT, "title": "PipeMorphJob", **schema}


def _drop_titles(node: Any) -> None:
    """Drop the titles that pydantic makes of field names: editors would show them as text."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for inner in node.values():
            _drop_titles(inner)
    elif isinstance(node, list):
        for inner in node:
            _drop_titles(inner)
