"""All objects of one attempt: Service, ConfigMap, Job, and a PodGroup where asked for.

The engine's Secret is not here: it is random, so it is created once and never applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipemorph.spec import PipeMorphJob
from pipemorph_operator import names
from pipemorph_operator.children import gang, naming, pod
from pipemorph_operator.config import OperatorConfig

Object = dict[str, Any]


class Unbuildable(Exception):
    """No objects can be made of this job; more of the same will not help."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Attempt:
    """One attempt of one job, with all that goes into its objects."""

    job: PipeMorphJob
    uid: str
    number: int
    excluded_nodes: tuple[str, ...] = ()
    unwanted_nodes: tuple[str, ...] = ()
    """Used where no others have room."""

    @property
    def ranks(self) -> int:
        return self.job.spec.parallelism.world_size

    @property
    def namespace(self) -> str:
        return self.job.metadata.namespace

    @property
    def name(self) -> str:
        return naming.attempt_name(self.job.metadata.name, self.uid, self.number, self.ranks)

    @property
    def service(self) -> str:
        return naming.service_name(self.job.metadata.name, self.uid)

    @property
    def master_address(self) -> str:
        """Stable name of rank 0's pod; with the attempt in it, so never an old pod's."""
        return f"{self.name}-0.{self.service}.{self.namespace}.svc"

    @property
    def audience(self) -> str:
        return audience(self.namespace, self.job.metadata.name, self.uid)

    @property
    def queued_by_kueue(self) -> bool:
        """Whether Kueue starts and stops the Job, so that ``suspend`` is not ours to set."""
        return names.KUEUE_QUEUE in gang.job_labels(self.job)

    def labels(self) -> dict[str, str]:
        return {
            names.LABEL_JOB: self.job.metadata.name,
            names.LABEL_JOB_UID: self.uid,
            names.LABEL_ATTEMPT: str(self.number),
            "app.kubernetes.io/name": "pipemorph-trainer",
            "app.kubernetes.io/instance": self.job.metadata.name,
            "app.kubernetes.io/managed-by": names.OPERATOR_OWNER,
            "app.kubernetes.io/part-of": "pipemorph",
        }

    def metadata(self, name: str, labels: Mapping[str, str] | None = None) -> Object:
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": dict(labels if labels is not None else self.labels()),
            "ownerReferences": [
                {
                    "apiVersion": names.API_VERSION,
                    "kind": names.KIND,
                    "name": self.job.metadata.name,
                    "uid": self.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        }


def audience(namespace: str, name: str, uid: str) -> str:
    """Audience of the job's tokens: good for this job's ingest and nothing else."""
    return f"{names.API_GROUP}/jobs/{namespace}/{name}/{uid}"


def objects(attempt: Attempt, config: OperatorConfig) -> list[Object]:
    """What to apply, in order: what pods need comes before the Job that makes them.

    Raises :class:`Unbuildable`.
    """
    out = [service(attempt), config_map(attempt, config)]
    if (group := gang.pod_group(attempt)) is not None:
        out.append(group)
    return [*out, batch_job(attempt, config)]


def service(attempt: Attempt) -> Object:
    """Headless: it gives every rank's pod its stable name, also before the pod is ready."""
    labels = {k: v for k, v in attempt.labels().items() if k != names.LABEL_ATTEMPT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": attempt.metadata(attempt.service, labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_JOB_UID: attempt.uid},
        },
    }


def job_file(job: PipeMorphJob) -> str:
    """The job as ranks read it: what they need, nothing an older trainer may not know."""
    whole = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for field in ("template", "placement", "suspend", "managedBy", "failurePolicy"):
        whole["spec"].pop(field, None)
    whole["metadata"] = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    whole |= {"apiVersion": names.API_VERSION, "kind": names.KIND}
    return json.dumps(whole, sort_keys=True)


def config_map(attempt: Attempt, config: OperatorConfig) -> Object:
    """The job's file and the ingest's CA, as they were when the attempt began."""
    data = {pod.JOB_FILE: job_file(attempt.job)}
    if config.ca_pem:
        data[pod.CA_FILE] = config.ca_pem
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": attempt.metadata(attempt.name),
        "immutable": True,
        "data": data,
    }


def secret(attempt: Attempt, key: str) -> Object:
    """The engine's secret of one attempt: a pod of another attempt cannot join this one."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": attempt.metadata(attempt.name),
        "immutable": True,
        "type": f"{names.API_GROUP}/engine",
        "stringData": {pod.SECRET_FILE: key},
    }


def batch_job(attempt: Attempt, config: OperatorConfig) -> Object:
    """One Indexed Job: completion index = rank. One failed rank ends the attempt."""
    labels = attempt.labels() | gang.job_labels(attempt.job)
    spec: Object = {
        "completions": attempt.ranks,
        "parallelism": attempt.ranks,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            # The order is read by policy.restart: the cluster's doing first.
            "rules": [
                {
                    "action": "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": pod.CONTAINER,
                        "operator": "NotIn",
                        "values": [0],
                    },
                },
            ]
        },
        "template": pod.template(attempt, config),
    }
    if not attempt.queued_by_kueue:
        spec["suspend"] = False
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": attempt.metadata(attempt.name, labels),
        "spec": spec,
    }
