"""Validates and normalises the user's pod template.

The CRD does not describe the template's fields, so the API server does not remove nulls. They count
as absent, as in Kubernetes: an empty ``resources:`` is a common slip. Fields that the operator
extends must have the right type; the API server checks all others when the Job is created.
"""

from __future__ import annotations

from typing import Any

from pipemorph.spec.base import FieldError
from pipemorph.spec.sections.template import TRAINER_CONTAINER, check_template
from pipemorph.yaml_json import format_value

Shape = type[str] | dict[str, Any] | list[Any]
"""Expected type: text; a mapping, with the shapes of some of its fields (``*``: of all); or a
list, with the shape of its items if they are checked."""

_POD_TERMS: Shape = {
    "requiredDuringSchedulingIgnoredDuringExecution": [],
    "preferredDuringSchedulingIgnoredDuringExecution": [],
}
_NODE_TERMS: Shape = {
    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": []}]},
    "preferredDuringSchedulingIgnoredDuringExecution": [],
}
_TEMPLATE: Shape = {
    "metadata": {"labels": {"*": str}, "annotations": {"*": str}},
    "spec": {
        "securityContext": {},
        "volumes": [],
        "topologySpreadConstraints": [{}],
        "affinity": {
            "podAffinity": _POD_TERMS,
            "podAntiAffinity": _POD_TERMS,
            "nodeAffinity": _NODE_TERMS,
        },
    },
}
_TRAINER: Shape = {
    "resources": {"requests": {}, "limits": {}},
    "securityContext": {"capabilities": {"add": []}},
    "volumeMounts": [{"mountPath": str}],
}


def remove_nulls(value: Any) -> Any:
    """Copy without null values in mappings. Nulls of lists stay, so that indices do not change."""
    if isinstance(value, dict):
        return {k: remove_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [remove_nulls(v) for v in value]
    return value


def validate_pod_template(given: dict[str, Any]) -> dict[str, Any]:
    """Validated copy of the template. Raises :class:`FieldError` with the field's path in the
    template, the value found and the expected type."""
    out: dict[str, Any] = remove_nulls(given)
    check_template(out)
    _check_shape(out, _TEMPLATE, "")
    for i, container in enumerate(out["spec"]["containers"]):
        if container["name"] == TRAINER_CONTAINER:
            _check_shape(container, _TRAINER, f"spec.containers[{i}]")
    return out


def find_spec_and_trainer(template: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pod spec and trainer container of a valid template; empty mappings if it has none."""
    spec: dict[str, Any] = remove_nulls(template or {}).get("spec", {})
    containers = spec.get("containers", [])
    return spec, next((c for c in containers if c.get("name") == TRAINER_CONTAINER), {})


def _check_shape(value: Any, shape: Shape, where: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise FieldError(where, f"is {format_value(value)}; expected a mapping")
        inner: dict[str, Any] = dict.fromkeys(value, shape["*"]) if "*" in shape else shape
        for key in (k for k in inner if k in value):
            _check_shape(value[key], inner[key], f"{where}.{key}".lstrip("."))
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise FieldError(where, f"is {format_value(value)}; expected a list")
        for i, item in enumerate(value):
            if shape:
                _check_shape(item, shape[0], f"{where}[{i}]")
    elif not isinstance(value, str):
        raise FieldError(where, f"is {format_value(value)}; expected text")
