"""Attempt of a job: the inputs of its objects, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph_operator import names
from pipemorph_operator.resources import object_names

Object = dict[str, Any]


class ResourceBuildError(Exception):
    """The job's objects cannot be built; a retry without an edit of the job fails again."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Attempt:
    """Attempt of a job, with all inputs of its objects."""

    job: PipeMorphJob
    uid: str
    number: int
    excluded_nodes: tuple[str, ...] = ()
    unwanted_nodes: tuple[str, ...] = ()
    """Nodes to use only if no other node has room."""

    @property
    def ranks(self) -> int:
        return self.job.spec.parallelism.world_size

    @property
    def pods(self) -> int:
        return self.job.spec.parallelism.pods

    @property
    def restarts_in_pods(self) -> bool:
        """True if ranks may start again within their pods."""
        return self.job.spec.failure_policy.max_restarts > 0

    @property
    def pods_per_pipeline(self) -> int | None:
        """Number of consecutive pods that the topology places together, those of a pipeline; None
        if it places the whole job together, or there is none."""
        cut, placement = self.job.spec.parallelism, self.job.spec.placement
        topology = placement.topology if placement else None
        if topology is None or topology.per == "job":
            return None
        return cut.mesh.pipeline_block_size // cut.ranks_per_pod

    @property
    def namespace(self) -> str:
        return self.job.metadata.namespace

    @property
    def name(self) -> str:
        return object_names.build_attempt_name(
            self.job.metadata.name, self.uid, self.number, self.pods
        )

    @property
    def page_secret_name(self) -> str:
        """Name of the Secret with the token of the live page."""
        return object_names.build_page_secret_name(self.name)

    @property
    def service_name(self) -> str:
        return object_names.build_service_name(self.job.metadata.name, self.uid)

    @property
    def master_address(self) -> str:
        """Stable DNS name of rank 0's pod; contains the attempt, so it never names an old pod."""
        return self.pod_address.replace("{}", "0")

    @property
    def pod_address(self) -> str:
        """DNS name of a pod, with ``{}`` in the place of its number."""
        return f"{self.name}-{{}}.{self.service_name}.{self.namespace}.svc"

    @property
    def token_audience(self) -> str:
        return build_token_audience(self.namespace, self.job.metadata.name, self.uid)

    def build_labels(self) -> dict[str, str]:
        return {
            names.LABEL_JOB: self.job.metadata.name,
            names.LABEL_JOB_UID: self.uid,
            names.LABEL_ATTEMPT: str(self.number),
            "app.kubernetes.io/name": "pipemorph-trainer",
            "app.kubernetes.io/instance": self.job.metadata.name,
            "app.kubernetes.io/managed-by": names.OPERATOR_OWNER,
            "app.kubernetes.io/part-of": "pipemorph",
        }

    def build_metadata(self, name: str, labels: Mapping[str, str] | None = None) -> Object:
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": dict(labels if labels is not None else self.build_labels()),
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


def build_token_audience(namespace: str, name: str, uid: str) -> str:
    """Audience of the job's tokens: they are valid for this job's ingest only."""
    return f"{names.API_GROUP}/jobs/{namespace}/{name}/{uid}"
