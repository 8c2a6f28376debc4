"""Applies ``spec.placement`` to a pod template: devices, networks, memory, nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pipemorph.spec.base import FieldError
from pipemorph.spec.sections.placement import PlacementSpec, RdmaDevices, Topology
from pipemorph_operator import names
from pipemorph_operator.resources import gang
from pipemorph_operator.resources.attempt import Attempt
from pipemorph_operator.resources.template_validation import find_spec_and_trainer

SHM_VOLUME = "pipemorph-shm"
SHM_PATH = "/dev/shm"
PREFERENCE = 100

Object = dict[str, Any]


def apply_placement(attempt: Attempt, template: Object, trainer: Object) -> None:
    """Apply the job's placement to a pod template; ``trainer`` is its trainer container."""
    placement = attempt.job.spec.placement or PlacementSpec()
    spec = template["spec"]
    if placement.rdma is not None:
        _request_devices(spec, trainer, placement.rdma)
    if placement.networks:
        _append_networks(template["metadata"]["annotations"], placement.networks)
    if placement.shared_memory is not None:
        _mount_shared_memory(spec, trainer, placement.shared_memory)
    job = {names.LABEL_JOB_UID: attempt.uid}
    if placement.one_pod_per_node:
        term = {"topologyKey": names.HOSTNAME_KEY, "labelSelector": {"matchLabels": job}}
        _require_affinity(spec, "podAntiAffinity", term)
    by_scheduler = attempt.pods_per_pipeline is not None or gang.packs_hypernodes(placement)
    if placement.topology is not None and not by_scheduler:
        # Select this attempt's ranks only: a rank of an earlier attempt that cannot terminate,
        # such as one on a rack without power, would attract them.
        own = {"matchLabels": job | {names.LABEL_ATTEMPT: str(attempt.number)}}
        _apply_topology(spec, placement.topology, own)
    avoid = sorted({*placement.exclude_nodes, *attempt.excluded_nodes})
    if avoid:
        _exclude_nodes(spec, avoid)
    unwanted = sorted({*attempt.unwanted_nodes} - {*avoid})
    if unwanted:
        _prefer_other_nodes(spec, unwanted)


def _request_devices(spec: Object, trainer: Object, rdma: RdmaDevices) -> None:
    """Request RDMA devices and IPC_LOCK. Extended resources need requests = limits. Kubernetes
    grants IPC_LOCK to user 0 only; for other users it has no effect, and a policy may reject it."""
    resources = trainer.setdefault("resources", {})
    for kind in ("requests", "limits"):
        resources.setdefault(kind, {})[rdma.resource_name] = str(rdma.count)
    user = (spec.get("securityContext") or {}) | (trainer.get("securityContext") or {})
    if rdma.ipc_lock and not user.get("runAsNonRoot") and not user.get("runAsUser"):
        capabilities = trainer.setdefault("securityContext", {}).setdefault("capabilities", {})
        added = capabilities.setdefault("add", [])
        if "IPC_LOCK" not in added:
            added.append("IPC_LOCK")


def _append_networks(annotations: dict[str, str], networks: list[str]) -> None:
    """Append networks to the template's annotation in its format: names, or a JSON list of objects.
    Raises :class:`FieldError` for invalid JSON."""
    given = annotations.get(names.MULTUS_NETWORKS, "").strip()
    if not given.startswith("["):
        annotations[names.MULTUS_NETWORKS] = ", ".join(filter(None, [given, *networks]))
        return
    try:
        listed = json.loads(given)
    except ValueError as error:
        where = f'metadata.annotations["{names.MULTUS_NETWORKS}"]'
        message = f"is invalid JSON ({error}); expected a JSON list or comma-separated names"
        raise FieldError(where, message) from None
    annotations[names.MULTUS_NETWORKS] = json.dumps(listed + [_parse_network(n) for n in networks])


def _parse_network(short: str) -> Object:
    """Multus JSON form of ``[namespace/]name[@interface]``."""
    whole, _, interface = short.partition("@")
    namespace, _, name = whole.rpartition("/")
    found = {"name": name, "namespace": namespace, "interface": interface}
    return {key: value for key, value in found.items() if value}


def _mount_shared_memory(spec: Object, trainer: Object, size: str) -> None:
    """Mount /dev/shm, unless the template mounts it; the preflight then checks its size."""
    if _mounts_shared_memory(trainer):
        return
    spec.setdefault("volumes", []).append(
        {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    )
    mount = {"name": SHM_VOLUME, "mountPath": SHM_PATH}
    trainer.setdefault("volumeMounts", []).append(mount)


def _mounts_shared_memory(trainer: Object) -> bool:
    mounts = trainer.get("volumeMounts", [])
    return any(mount.get("mountPath", "").rstrip("/") == SHM_PATH for mount in mounts)


def shares_default_shm(attempt: Attempt) -> bool:
    """True if several ranks of a pod share the container runtime's /dev/shm, by default 64 MiB."""
    job = attempt.job.spec
    spec, trainer = find_spec_and_trainer(job.template)
    given = (job.placement or PlacementSpec()).shared_memory is not None
    # With hostIPC, /dev/shm is the host's.
    given = given or bool(spec.get("hostIPC")) or _mounts_shared_memory(trainer)
    return job.parallelism.ranks_per_pod > 1 and not given


def _apply_topology(spec: Object, topology: Topology, own: Object) -> None:
    if topology.mode == "spread":
        constraint = {
            "maxSkew": 1,
            "topologyKey": topology.key,
            "whenUnsatisfiable": "DoNotSchedule" if topology.required else "ScheduleAnyway",
            "labelSelector": own,
        }
        given = spec.setdefault("topologySpreadConstraints", [])
        # Kubernetes allows one constraint per such pair; the template's takes precedence.
        pair = ("topologyKey", "whenUnsatisfiable")
        if not any(all(of.get(k) == constraint[k] for k in pair) for of in given):
            given.append(constraint)
        return
    term = {"topologyKey": topology.key, "labelSelector": own}
    if topology.required:
        _require_affinity(spec, "podAffinity", term)
    else:
        affinity = spec.setdefault("affinity", {}).setdefault("podAffinity", {})
        affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(
            {"weight": PREFERENCE, "podAffinityTerm": term}
        )


def _require_affinity(spec: Object, kind: str, term: Object) -> None:
    affinity = spec.setdefault("affinity", {}).setdefault(kind, {})
    affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).append(term)


def _exclude_nodes(spec: Object, nodes: Iterable[str]) -> None:
    """Exclude nodes. Node selector terms are alternatives, so each term must exclude the nodes."""
    required = (
        spec.setdefault("affinity", {})
        .setdefault("nodeAffinity", {})
        .setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    )
    terms = required.setdefault("nodeSelectorTerms", []) or [{}]
    required["nodeSelectorTerms"] = terms
    for term in terms:
        term.setdefault("matchFields", []).extend(_build_exclusions(nodes))


def _prefer_other_nodes(spec: Object, nodes: Iterable[str]) -> None:
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(
        {"weight": PREFERENCE, "preference": {"matchFields": _build_exclusions(nodes)}}
    )


def _build_exclusions(nodes: Iterable[str]) -> list[Object]:
    """Requirements that exclude the nodes, one each: ``matchFields`` allows one value."""
    return [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
