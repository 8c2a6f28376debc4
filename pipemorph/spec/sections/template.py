"""Requirements of ``spec.template``, the pod template of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipemorph.spec.base import FieldError

TRAINER_CONTAINER = "trainer"
"""Container of the pod template that runs the stage."""

RESERVED_ENV = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
)
RESERVED_ENV_PREFIXES = ("PIPEMORPH_", "PET_", "TORCHELASTIC_")


GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


def count_gpus(template: Mapping[str, Any] | None) -> int:
    """Number of GPUs that container ``trainer`` of a pod template requests per pod; 0 if it
    requests none of :data:`GPU_RESOURCES`."""
    containers = _as_mapping(_as_mapping(template).get("spec")).get("containers")
    for container in containers if isinstance(containers, list) else []:
        if _as_mapping(container).get("name") == TRAINER_CONTAINER:
            limits = _as_mapping(_as_mapping(container.get("resources")).get("limits"))
            counts = [str(limits[name]) for name in GPU_RESOURCES if name in limits]
            return sum(int(count) for count in counts if count.isdecimal())
    return 0


def _as_mapping(value: object) -> Mapping[str, Any]:
    """Value as a mapping; empty if it is none: objects of a cluster may lack any field."""
    return value if isinstance(value, Mapping) else {}


def check_template(template: Mapping[str, Any]) -> None:
    """Raise :class:`FieldError` unless the pod template can run a stage: it has a container
    ``trainer`` and sets none of the reserved variables.

    Checks only fields that PipeMorph reads; Kubernetes checks the rest.
    """
    spec = template.get("spec")
    if not isinstance(spec, dict):
        raise FieldError("spec", f"is {_describe_type(spec)}; expected a pod spec with containers")
    if not isinstance(template.get("metadata", {}), dict):
        raise FieldError(
            "metadata", f"is {_describe_type(template['metadata'])}; expected a mapping"
        )
    names = []
    for group in ("containers", "initContainers"):
        containers = spec.get(group, [] if group == "initContainers" else None)
        if not isinstance(containers, list):
            raise FieldError(f"spec.{group}", f"is {_describe_type(containers)}; expected a list")
        for i, container in enumerate(containers):
            name = _check_container(f"spec.{group}[{i}]", container)
            if group == "containers":
                names.append(name)
    if TRAINER_CONTAINER not in names:
        found = ", ".join(names) or "none"
        raise FieldError(
            "spec.containers",
            f"has no container named {TRAINER_CONTAINER}, which runs the stage; found: {found}",
        )


def _check_container(where: str, container: object) -> str:
    """Check a container; return its name."""
    if not isinstance(container, dict):
        raise FieldError(where, f"is {_describe_type(container)}; expected a container")
    name = container.get("name")
    if not isinstance(name, str) or not name:
        raise FieldError(
            f"{where}.name", f"is {_describe_type(name)}; expected the container's name"
        )
    env = container.get("env", [])
    if not isinstance(env, list):
        raise FieldError(
            f"{where}.env", f"is {_describe_type(env)}; expected a list of name and value"
        )
    for i, variable in enumerate(env):
        key = variable.get("name") if isinstance(variable, dict) else None
        if not isinstance(key, str) or not key:
            raise FieldError(f"{where}.env[{i}]", "has no name; expected name and value")
        if key in RESERVED_ENV or key.startswith(RESERVED_ENV_PREFIXES):
            raise FieldError(
                f"{where}.env[{i}].name",
                f"is {key}, which is reserved in container {name}: PipeMorph sets it",
            )
    return name


def _describe_type(value: object) -> str:
    """Type of a value for messages, or ``missing``."""
    if value is None:
        return "missing"
    kinds = {dict: "a mapping", list: "a list", str: "text", bool: "true or false"}
    return kinds.get(type(value), "a number")
