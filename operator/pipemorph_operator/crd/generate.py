"""Generates the CRDs from the models: ``python -m pipemorph_operator.crd FOLDER…``.

Converts pydantic's JSON Schema to a structural schema: no ``$ref``, no ``anyOf``, a type on every
node, no ``additionalProperties: false`` (the API server prunes unknown fields, and rejects them
under strict validation, which kubectl requests).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from pipemorph.removed import FIELDS
from pipemorph.spec.job_spec import API_GROUP, KIND, JobSpec
from pipemorph.spec.job_status import JobStatus
from pipemorph_operator.crd.descriptions import DESCRIPTIONS
from pipemorph_operator.crd.rules import RULES
from pipemorph_operator.names import PLURAL, VERSION

Schema = dict[str, Any]

_COPIED_KEYWORDS = (
    "description", "type", "format", "enum", "pattern", "default",
    "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "required",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip

_MAP_ENTRIES = 64
"""Limit of labels or annotations; the API server needs bounds to estimate the cost of CEL rules."""


def to_structural_schema(schema: Schema, root: Schema, path: str) -> Schema:
    """Structural form of a JSON Schema node. Raises ValueError if it has none."""
    schema = _resolve_references(schema, root)
    if "anyOf" in schema:
        choices = [c for c in schema["anyOf"] if c.get("type") != "null"]
        outer = {k: v for k, v in schema.items() if k != "anyOf"}
        if len(choices) == 1:
            schema = _resolve_references({**choices[0], **outer}, root)
        else:
            return _convert_number_or_list(choices, outer, path)
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    out: Schema = {k: schema[k] for k in _COPIED_KEYWORDS if k in schema}
    if out.get("default", ...) is None:
        del out["default"]
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if flag in schema:
            out[bound], out[flag] = schema[flag], True
    if path in DESCRIPTIONS:
        out["description"] = DESCRIPTIONS[path]
    if "description" in out:
        out["description"] = " ".join(str(out["description"]).replace("`", "").split())
    kind = schema.get("type")
    if kind == "object":
        _convert_object(out, schema, root, path)
    elif kind == "array":
        out["items"] = to_structural_schema(schema["items"], root, f"{path}[]")
        if "maxItems" not in out:
            raise ValueError(f"{path}: the list has no maxItems")
    elif kind == "integer":
        out["format"] = "int64"
    elif kind not in ("string", "number", "boolean"):
        raise ValueError(f"{path}: no structural form of {schema}")
    if rules := RULES.get(path):
        out["x-kubernetes-validations"] = [rule.to_schema() for rule in rules]
    return out


def _convert_object(out: Schema, schema: Schema, root: Schema, path: str) -> None:
    properties = schema.get("properties")
    extra = schema.get("additionalProperties")
    if properties is not None:
        out["properties"] = {
            name: to_structural_schema(inner, root, f"{path}.{name}")
            for name, inner in properties.items()
        }
        prefix = path.replace("[]", "") + "."
        for removed, replacement in FIELDS.items():
            if removed.startswith(prefix) and "." not in removed.removeprefix(prefix):
                out["properties"][removed.removeprefix(prefix)] = {
                    "description": f"Removed; {replacement}.",
                    "x-kubernetes-preserve-unknown-fields": True,
                }
        # The API server applies defaults of nested fields only if the object itself exists.
        if "default" in out:
            out["default"] = {}
    elif isinstance(extra, dict) and extra:
        out["additionalProperties"] = to_structural_schema(extra, root, f"{path}.*")
        out["maxProperties"] = _MAP_ENTRIES
    else:
        out["x-kubernetes-preserve-unknown-fields"] = True


def _convert_number_or_list(choices: list[Schema], outer: Schema, path: str) -> Schema:
    """Form of a number for all stages, or a list with one per stage. No structural type expresses
    that: the node has no type, and the bounds of both kinds apply."""
    if sorted(c.get("type", "") for c in choices) != ["array", "integer"]:
        raise ValueError(f"{path}: only integer-or-list has a structural form, not {choices}")
    number = next(c for c in choices if c["type"] == "integer")
    array = next(c for c in choices if c["type"] == "array")
    return {
        "description": DESCRIPTIONS.get(path, outer.get("description", "")),
        "x-kubernetes-preserve-unknown-fields": True,
        "minimum": number["minimum"],
        "maxItems": array["maxItems"],
    }


def _resolve_references(schema: Schema, root: Schema) -> Schema:
    """Follow ``$ref``; sibling keys, such as the field's description, take precedence."""
    while "$ref" in schema:
        target = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        schema = {**target, **{k: v for k, v in schema.items() if k != "$ref"}}
    return schema


def _build_template_schema() -> Schema:
    """Schema of the pod template: unstructured, except for fields that the CEL rules read."""
    env = {
        "type": "array",
        "description": DESCRIPTIONS["spec.template.spec.containers[].env"],
        "maxItems": 512,
        "items": {
            "type": "object",
            "description": DESCRIPTIONS["spec.template.spec.containers[].env[]"],
            "required": ["name"],
            "properties": {
                "name": {
                    "type": "string",
                    "maxLength": 256,
                    "description": DESCRIPTIONS["spec.template.spec.containers[].env[].name"],
                }
            },
            "x-kubernetes-preserve-unknown-fields": True,
        },
    }
    containers = {
        "type": "array",
        "description": DESCRIPTIONS["spec.template.spec.containers"],
        "minItems": 1,
        "maxItems": 16,
        "items": {
            "type": "object",
            "description": DESCRIPTIONS["spec.template.spec.containers[]"],
            "required": ["name"],
            "properties": {
                "name": {
                    "type": "string",
                    "maxLength": 63,
                    "description": DESCRIPTIONS["spec.template.spec.containers[].name"],
                },
                "env": env,
            },
            "x-kubernetes-preserve-unknown-fields": True,
        },
    }
    return {
        "type": "object",
        "description": DESCRIPTIONS["spec.template"],
        "required": ["spec"],
        "properties": {
            "metadata": {
                "type": "object",
                "description": DESCRIPTIONS["spec.template.metadata"],
                "x-kubernetes-preserve-unknown-fields": True,
            },
            "spec": {
                "type": "object",
                "description": DESCRIPTIONS["spec.template.spec"],
                "required": ["containers"],
                "properties": {"containers": containers},
                "x-kubernetes-preserve-unknown-fields": True,
            },
        },
        "x-kubernetes-validations": [rule.to_schema() for rule in RULES["spec.template"]],
    }


_COLUMNS = (
    ("State", "string", ".status.state", "The conditions in one word."),
    ("Ready", "string", ".status.ready", "Ready pods of all pods."),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason',
     "Reason of condition Ready; describe shows the message."),
    ("Iteration", "integer", ".status.training.iteration", "Iteration in progress."),
    ("Done", "string", ".status.training.done", "Finished part of the iterations."),
    ("Slow-Links", "integer", ".status.training.slowLinkCount", "Currently slow links."),
    ("Plan", "integer", ".status.training.appliedPlanVersion", "Plan in effect."),
    ("Gain", "string", ".status.training.gain",
     "Promised/measured gain of the newest measured change of plan."),
    ("Goodput", "string", ".status.goodputPercent",
     "Time of finished iterations over the time in which the job had its place."),
    ("Left", "string", ".status.training.left", "Remaining time, as of the last write of status."),
    ("Age", "date", ".metadata.creationTimestamp", "Since creation."),
)  # fmt: skip
"""Printer columns: name, type, path and description."""
_WIDE_COLUMNS = (
    ("Attempt", "integer", ".status.attempt", "Attempt in progress, from 0."),
    ("Seconds", "number", ".status.training.iterationSeconds", "Time of an iteration."),
    ("Bubble", "number", ".status.training.bubbleFraction",
     "Idle time over stages × iteration time."),
    ("Saved", "number", ".status.training.savedSeconds",
     "Seconds that plan changes have saved."),
    ("Recoveries", "integer", ".status.recoveries.count",
     "Starts of the ranks within their pods."),
)  # fmt: skip
"""Columns that ``kubectl get -o wide`` shows as well."""


def _build_columns(rows: Iterable[tuple[str, ...]], **more: int) -> list[Schema]:
    keys = ("name", "type", "jsonPath", "description")
    return [{**dict(zip(keys, row, strict=True)), **more} for row in rows]


def build_job_definition() -> dict[str, Any]:
    """CustomResourceDefinition of PipeMorphJobs."""
    spec_root = JobSpec.model_json_schema(by_alias=True, mode="validation")
    status_root = JobStatus.model_json_schema(by_alias=True, mode="validation")
    spec = to_structural_schema(spec_root, spec_root, "spec")
    spec["properties"]["template"] = _build_template_schema()
    for node in _walk_nodes(spec):
        # A list is compared and applied as a whole: a default that the API server adds to an item
        # is a permanent difference to Argo CD, and a conflict between server-side managers.
        for inner in _walk_nodes(node.get("items") or {}):
            if (default := inner.pop("default", {})) != {}:
                inner["description"] += f" Default: {default}."
    status = to_structural_schema(status_root, status_root, "status")
    for node in _walk_nodes(status):
        node.pop("default", None)  # Status writers set every field themselves.
    # Generations begin at 1: with 0, generic tools show a job without an operator as in progress.
    status["default"] = {"observedGeneration": 0}
    schema = {
        "type": "object",
        "description": "PipeMorphJob is a pipeline-parallel training job that adapts its schedule "
        "to slow links between its stages.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{API_GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": KIND},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": [rule.to_schema() for rule in RULES[""]],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{API_GROUP}",
            "labels": {"app.kubernetes.io/part-of": "pipemorph"},
        },
        "spec": {
            "group": API_GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["pmj", "pmjs"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        *_build_columns(_COLUMNS),
                        *_build_columns(_WIDE_COLUMNS, priority=1),
                    ],
                }
            ],
        },
    }


def _walk_nodes(schema: Schema) -> Iterator[Schema]:
    """Iterate over a schema node and all its descendants."""
    yield schema
    for inner in schema.get("properties", {}).values():
        yield from _walk_nodes(inner)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _walk_nodes(schema[key])


class _PlainDumper(yaml.SafeDumper):
    """YAML dumper without anchors, which readers of a CRD do not expect."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def render_files() -> dict[str, str]:
    """Text of each file of ``crds/``, by name."""
    head = "# Generated by: python -m pipemorph_operator.crd. Do not edit.\n"
    return {
        f"{API_GROUP}_{PLURAL}.yaml": head
        + yaml.dump(
            build_job_definition(),
            Dumper=_PlainDumper,
            sort_keys=False,
            width=100,
            allow_unicode=True,
        )
    }
