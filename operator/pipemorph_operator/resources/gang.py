"""Gang scheduling (all ranks or none) with Kueue, Volcano or the coscheduling plugin."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.sections.placement import PlacementSpec
from pipemorph_operator import names
from pipemorph_operator.resources.attempt import Attempt

SCHEDULE_TIMEOUT_SECONDS = 300
"""Longest wait of the coscheduling plugin for room for the whole gang."""


def build_kueue_labels(job: PipeMorphJob) -> dict[str, str]:
    """Kueue labels of the Job, from the PipeMorphJob's labels or from ``placement.gang``."""
    labels = {k: v for k, v in job.metadata.labels.items() if k.startswith(names.KUEUE_PREFIX)}
    placement = job.spec.placement
    kueue = placement.gang.kueue if placement and placement.gang else None
    if kueue is not None:
        labels[names.KUEUE_QUEUE] = kueue.queue
        if kueue.priority_class:
            labels[names.KUEUE_PRIORITY] = kueue.priority_class
    return labels


def is_queued_by_kueue(job: PipeMorphJob) -> bool:
    """True if Kueue starts and stops the Job, so that the operator must not set ``suspend``."""
    return names.KUEUE_QUEUE in build_kueue_labels(job)


def add_gang_fields(attempt: Attempt, template: dict[str, Any]) -> None:
    """Add the labels, annotations and scheduler name that the gang's scheduler needs. Keeps the
    scheduler that the user's template names."""
    placement = attempt.job.spec.placement
    gang = placement.gang if placement else None
    if placement is None or gang is None:
        return
    metadata, spec = template["metadata"], template["spec"]
    topology = placement.topology
    if gang.kueue is not None and topology is not None and topology.mode == "pack":
        annotations, pods = metadata["annotations"], attempt.pods_per_pipeline
        if pods is not None:
            annotations[names.KUEUE_SLICE_TOPOLOGY] = topology.key
            annotations[names.KUEUE_SLICE_SIZE] = str(pods)
        elif topology.required:
            annotations.setdefault(names.KUEUE_REQUIRED_TOPOLOGY, topology.key)
        else:
            annotations.setdefault(names.KUEUE_PREFERRED_TOPOLOGY, topology.key)
    if gang.volcano is not None:
        metadata["annotations"][names.VOLCANO_GROUP] = attempt.name
        spec.setdefault("schedulerName", "volcano")
    if gang.coscheduling is not None:
        metadata["labels"][names.COSCHEDULING_GROUP] = attempt.name
        spec.setdefault("schedulerName", gang.coscheduling.scheduler_name)


def build_pod_group(attempt: Attempt, template: dict[str, Any]) -> dict[str, Any] | None:
    """PodGroup of the attempt, whose pods have ``template``; None if its scheduler needs none."""
    placement = attempt.job.spec.placement
    gang = placement.gang if placement else None
    if gang is None:
        return None
    if gang.volcano is not None:
        spec: dict[str, Any] = {"minMember": attempt.pods, "queue": gang.volcano.queue}
        if gang.volcano.priority_class:
            spec["priorityClassName"] = gang.volcano.priority_class
        if resources := _sum_pod_resources(template, attempt.pods):
            spec["minResources"] = resources
        spec |= _build_network_topology(attempt)
        group = "scheduling.volcano.sh/v1beta1"
    elif gang.coscheduling is not None:
        spec = {
            "minMember": attempt.pods,
            "scheduleTimeoutSeconds": SCHEDULE_TIMEOUT_SECONDS,
        }
        group = "scheduling.x-k8s.io/v1alpha1"
    else:
        return None
    return {
        "apiVersion": group,
        "kind": "PodGroup",
        "metadata": attempt.build_metadata(attempt.name),
        "spec": spec,
    }


def _sum_pod_resources(template: dict[str, Any], pods: int) -> dict[str, str]:
    """Resources that all pods request together; Volcano admits the group if its queue has room for
    them. Skips quantities that cannot be parsed: the API server refuses such a Job."""
    total: dict[str, Decimal] = {}
    for container in template["spec"]["containers"]:
        given = container.get("resources") or {}
        for name, quantity in {
            **(given.get("limits") or {}),
            **(given.get("requests") or {}),
        }.items():
            try:
                amount = parse_quantity(str(quantity))  # type: ignore[no-untyped-call]
            except ValueError:
                continue
            total[name] = total.get(name, Decimal(0)) + amount * pods
    return {
        name: f"{int(amount * 1000)}m" if amount % 1 else str(int(amount))
        for name, amount in total.items()
    }


def packs_hypernodes(placement: PlacementSpec) -> bool:
    """True if Volcano places ranks together by the tiers of its HyperNodes, not by a label."""
    volcano = placement.gang.volcano if placement.gang else None
    packed = placement.topology is not None and placement.topology.mode == "pack"
    return packed and volcano is not None and volcano.tier is not None


def _build_network_topology(attempt: Attempt) -> dict[str, Any]:
    """Fields of a PodGroup that place the job, or each pipeline, within a HyperNode."""
    placement = attempt.job.spec.placement
    if placement is None or not packs_hypernodes(placement):
        return {}
    assert placement.topology is not None and placement.gang and placement.gang.volcano
    mode = "hard" if placement.topology.required else "soft"
    topology = {"mode": mode, "highestTierAllowed": placement.gang.volcano.tier}
    size = attempt.pods_per_pipeline
    if size is None:
        return {"networkTopology": topology}
    policies = [
        {
            "name": f"pipeline-{first // size}",
            "subGroupSize": size,
            "labelSelector": {
                "matchExpressions": [
                    {
                        "key": names.COMPLETION_INDEX,
                        "operator": "In",
                        "values": [str(index) for index in range(first, first + size)],
                    }
                ]
            },
            "networkTopology": topology,
        }
        for first in range(0, attempt.pods, size)
    ]
    return {"subGroupPolicy": policies}


def with_config_map_owner(config_map: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """PodGroup with the attempt's ConfigMap, as returned by the API server, as its only owner.
    Deleting the ConfigMap garbage-collects the PodGroup, which returns its quota to the queue; the
    operator has no permission to delete PodGroups."""
    owner = {k: config_map[k] for k in ("apiVersion", "kind")}
    owner |= {k: config_map["metadata"][k] for k in ("name", "uid")}
    return group | {"metadata": group["metadata"] | {"ownerReferences": [owner]}}
