"""The CRD: generated from the models, structural, described, bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipemorph.spec.job_spec import JobSpec
from pipemorph_operator.crd.descriptions import DESCRIPTIONS
from pipemorph_operator.crd.generate import build_job_definition, render_files, to_structural_schema
from pipemorph_operator.crd.rules import RULES

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("crds", "charts/pipemorph-operator/files")

Node = dict[str, Any]


def schema() -> Node:
    return schema_of(build_job_definition())


def schema_of(definition: Node) -> Node:
    root: Node = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return root


def walk(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from walk(node["additionalProperties"], f"{path}.*")


@pytest.mark.parametrize("folder", FOLDERS)
def test_checked_in_copies_are_what_the_models_say(folder: str) -> None:
    found = {each.name: each.read_text() for each in (ROOT / folder).glob("*.yaml")}
    assert found == render_files(), f"{folder} is old: python -m pipemorph_operator.crd {folder}"


def test_rendered_files_are_the_definitions() -> None:
    found = [yaml.safe_load(text) for text in render_files().values()]
    assert found == [build_job_definition()]


def test_every_node_is_structural_bounded_and_described() -> None:
    nodes = dict(walk(schema(), ""))
    assert len(nodes) > 150, "looked in the wrong place"
    for path, node in nodes.items():
        assert not {"$ref", "anyOf", "oneOf", "allOf", "const", "title"} & set(node), path
        assert "type" in node or node.get("x-kubernetes-preserve-unknown-fields"), path
        assert node.get("additionalProperties") is not False, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        # A list is one value to Argo CD and to server-side apply: an added item is a change.
        assert "[]" not in path or "default" not in node, path
        # The API server allows no description of metadata: it has its own.
        if path != "metadata" and not path.endswith(("[]", ".*")):
            assert node.get("description"), f"{path} has no description for kubectl explain"


def test_rules_and_texts_stand_at_fields_that_exist() -> None:
    nodes = dict(walk(schema(), ""))
    assert set(RULES) <= set(nodes), set(RULES) - set(nodes)
    assert set(DESCRIPTIONS) <= set(nodes), set(DESCRIPTIONS) - set(nodes)
    for path, rules in RULES.items():
        assert nodes[path]["x-kubernetes-validations"] == [rule.to_schema() for rule in rules]
        for rule in rules:
            below = f"{path}{rule.field_path}"
            assert below in nodes, f"rule at {path}: {below} does not exist"


@pytest.mark.parametrize(
    ("unless", "fields"),
    [
        (
            "!has(self.parallelism.minReplicas) || ",
            "failurePolicy recovery.neighbour recovery.snapshotIterations adaptation.relayout",
        ),
        (
            "!has(self.adaptation) || !self.adaptation.relayout || ",
            "failurePolicy recovery.snapshotIterations parallelism.stagesPerRank "
            "parallelism.layers",
        ),
    ],
    ids=["fewer replicas", "relayout"],
)
def test_what_does_not_go_with_it_is_refused_at_admission(unless: str, fields: str) -> None:
    """Fields that the model refuses: most can be edited, and a refused job is not served."""
    found = {
        rule.field_path: rule.expression.removeprefix(unless)
        for rule in RULES["spec"]
        if rule.expression.startswith(unless)
    }
    assert set(found) == {f".{field}" for field in fields.split()}
    nodes = dict(walk(schema(), ""))
    assert nodes["spec.adaptation.relayout"]["default"] is False
    for field, rule in found.items():
        # Only what has a default may be read without looking whether it is there.
        for name in re.findall(r"self((?:\.\w+)+)(?= >| ==|$)", rule):
            default = nodes[f"spec{name}"].get("default")
            assert default is not None or f"has(self{name})" in rule, field


def test_one_number_or_one_per_stage_keeps_its_bounds() -> None:
    node = dict(walk(schema(), ""))["spec.schedule.inFlightLimit"]
    assert node["x-kubernetes-preserve-unknown-fields"] is True
    assert "type" not in node
    assert (node["minimum"], node["maxItems"]) == (1, 512)


def test_every_field_of_the_spec_is_there() -> None:
    spec = schema()["properties"]["spec"]["properties"]
    assert set(spec) == {f.alias or name for name, f in JobSpec.model_fields.items()}


def test_conditions_are_a_map_by_type() -> None:
    """Conditions of different types have two owners, which must not replace each other's."""
    conditions = dict(walk(schema(), ""))["status.conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_a_list_without_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="the list has no maxItems"):
        to_structural_schema({"type": "array", "items": {"type": "string"}}, {}, "spec.x")


def test_a_union_that_no_structural_schema_can_say_is_refused() -> None:
    node = {"anyOf": [{"type": "string"}, {"type": "object"}]}
    with pytest.raises(ValueError, match="only integer-or-list"):
        to_structural_schema(node, {}, "spec.x")


def test_printer_columns_and_short_names() -> None:
    spec = build_job_definition()["spec"]
    columns = [
        c["name"] for c in spec["versions"][0]["additionalPrinterColumns"] if "priority" not in c
    ]
    assert columns == [
        "State",
        "Ready",
        "Reason",
        "Iteration",
        "Done",
        "Slow-Links",
        "Plan",
        "Gain",
        "Goodput",
        "Left",
        "Age",
    ]
    assert spec["names"]["shortNames"] == ["pmj", "pmjs"]
    assert spec["versions"][0]["subresources"] == {"status": {}}


def test_status_of_a_job_has_the_version_and_no_plan() -> None:
    control = dict(walk(schema(), ""))["status.control"]
    assert control["required"] == [*control["properties"]] == ["planVersion"]
