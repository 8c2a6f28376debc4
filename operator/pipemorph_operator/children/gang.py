"""Gang scheduling (all ranks or none) with Kueue, Volcano or the coscheduling plugin."""

from __future__ import annotations

from typing import Any

from pipemorph.api.spec import PipeMorphJob
from pipemorph_operator import names
from pipemorph_operator.children.attempt import Attempt


def job_labels(job: PipeMorphJob) -> dict[str, str]:
    """Kueue labels of the Job, from the PipeMorphJob's labels or from ``placement.gang``."""
    labels = {k: v for k, v in job.metadata.labels.items() if k.startswith(names.KUEUE_PREFIX)}
    placement = job.spec.placement
    kueue = placement.gang.kueue if placement and placement.gang else None
    if kueue is not None:
        labels[names.KUEUE_QUEUE] = kueue.queue
        if kueue.priority_class:
            labels[names.KUEUE_PRIORITY] = kueue.priority_class
    return labels


def queued_by_kueue(job: PipeMorphJob) -> bool:
    """Whether Kueue starts and stops the Job, so that the operator must not set ``suspend``."""
    return names.KUEUE_QUEUE in job_labels(job)


def mark_pods(attempt: Attempt, template: dict[str, Any]) -> None:
    """Add the labels, annotations and scheduler name that the gang's scheduler needs. Keeps the
    scheduler that the user's template names."""
    placement = attempt.job.spec.placement
    gang = placement.gang if placement else None
    if placement is None or gang is None:
        return
    metadata, spec = template["metadata"], template["spec"]
    topology = placement.topology
    if gang.kueue is not None and topology is not None and topology.mode == "pack":
        key = names.KUEUE_REQUIRED_TOPOLOGY if topology.required else names.KUEUE_PREFERRED_TOPOLOGY
        metadata["annotations"].setdefault(key, topology.key)
    if gang.volcano is not None:
        metadata["annotations"][names.VOLCANO_GROUP] = attempt.name
        spec.setdefault("schedulerName", "volcano")
    if gang.coscheduling is not None:
        metadata["labels"][names.COSCHEDULING_GROUP] = attempt.name
        spec.setdefault("schedulerName", gang.coscheduling.scheduler_name)


def pod_group(attempt: Attempt) -> dict[str, Any] | None:
    """The PodGroup of the attempt; None if the gang's scheduler needs none."""
    placement = attempt.job.spec.placement
    gang = placement.gang if placement else None
    if gang is None:
        return None
    if gang.volcano is not None:
        spec: dict[str, Any] = {"minMember": attempt.pods, "queue": gang.volcano.queue}
        if gang.volcano.priority_class:
            spec["priorityClassName"] = gang.volcano.priority_class
        group = "scheduling.volcano.sh/v1beta1"
    elif gang.coscheduling is not None:
        spec = {
            "minMember": attempt.pods,
            "scheduleTimeoutSeconds": gang.coscheduling.schedule_timeout_seconds,
        }
        group = "scheduling.x-k8s.io/v1alpha1"
    else:
        return None
    return {
        "apiVersion": group,
        "kind": "PodGroup",
        "metadata": attempt.metadata(attempt.name),
        "spec": spec,
    }


def owned_by(config_map: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The PodGroup with the attempt's ConfigMap as its only owner. ``config_map`` is as the API
    server returned it, with its UID. Deleting the ConfigMap garbage-collects the PodGroup, which
    returns its quota to the queue; the operator has no permission to delete PodGroups."""
    owner = {k: config_map[k] for k in ("apiVersion", "kind")}
    owner |= {k: config_map["metadata"][k] for k in ("name", "uid")}
    return group | {"metadata": group["metadata"] | {"ownerReferences": [owner]}}
