"""The user's pod template, such that building on it needs no doubt.

The API server leaves nulls in it, since it knows no fields of it that could be null. Null is
absent, as Kubernetes has it: an empty ``resources:`` is an everyday slip. What is built on must be
of its type; all else is the API server's to judge.
"""

from __future__ import annotations

from typing import Any

from pipemorph.api.spec import TRAINER_CONTAINER, FieldError, check_template
from pipemorph.document import shown

Shape = type[str] | dict[str, Any] | list[Any]
"""Text; a mapping with the shapes of some of its fields (``*``: of all); a list, with the shape
of its items if that matters."""

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


def without_nulls(value: Any) -> Any:
    """A copy in which no mapping has a null. A list keeps its own: leaving one out would move
    the others."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def pod_template(given: dict[str, Any]) -> dict[str, Any]:
    """A copy of the template to build on. Raises :class:`FieldError`, with the field's path in
    the template, what was found and what was expected."""
    out: dict[str, Any] = without_nulls(given)
    check_template(out)
    _check(out, _TEMPLATE, "")
    for i, container in enumerate(out["spec"]["containers"]):
        if container["name"] == TRAINER_CONTAINER:
            _check(container, _TRAINER, f"spec.containers[{i}]")
    return out


def _check(value: Any, shape: Shape, where: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise FieldError(where, f"is {shown(value)}; expected a mapping")
        inner: dict[str, Any] = dict.fromkeys(value, shape["*"]) if "*" in shape else shape
        for key in (k for k in inner if k in value):
            _check(value[key], inner[key], f"{where}.{key}".lstrip("."))
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise FieldError(where, f"is {shown(value)}; expected a list")
        for i, item in enumerate(value):
            if shape:
                _check(item, shape[0], f"{where}[{i}]")
    elif not isinstance(value, str):
        raise FieldError(where, f"is {shown(value)}; expected text")
