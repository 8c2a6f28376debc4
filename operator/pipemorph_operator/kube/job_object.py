"""Reads a PipeMorphJob from its API object, and formats its status for the API."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from pydantic import ValidationError

from pipemorph.errors import InputError
from pipemorph.manifest import describe_job_error
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import JobStatus
from pipemorph_operator import names
from pipemorph_operator.resources.object_names import build_attempt_name


def read_job(body: Mapping[str, Any]) -> PipeMorphJob:
    """Parse the job of an API object. Does not check the pod template
    (:func:`~pipemorph_operator.resources.template_validation.validate_pod_template` does when it
    builds pods), nor whether the spec allows a plan
    (:mod:`pipemorph_operator.reconcile.plan_checks`). Raises :class:`InputError` with one line that
    names the field."""
    metadata = body["metadata"]
    spec = dict(body.get("spec") or {})
    # The template can be edited: an invalid one must not end an attempt that already has its pods.
    template = spec.pop("template", None)
    document = {
        "apiVersion": body.get("apiVersion", names.API_VERSION),
        "kind": names.KIND,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": dict(metadata.get("labels") or {}),
        },
        "spec": spec,
    }
    try:
        job = PipeMorphJob.model_validate(document)
    except ValidationError as error:
        raise InputError(describe_job_error(error)) from None
    job.spec.template = template
    return job


_DISPLAY_FIELDS = ("state", "ready", "pods", "training", "goodput", "goodputPercent", "usefulTime")
"""Fields of status that are only displayed, or that their writer writes again."""


def read_status(body: Mapping[str, Any]) -> JobStatus:
    """Status of an API object. Omits unreadable fields of another release on which no decision
    depends; raises :class:`pydantic.ValidationError` for other unreadable fields."""
    raw = body.get("status") or {}
    try:
        return JobStatus.model_validate(raw)
    except ValidationError as error:
        found = [each["loc"] for each in error.errors()]
    bad = {loc[0] for loc in found if loc[0] in _DISPLAY_FIELDS}
    items = {loc[:2] for loc in found if loc[0] in ("attempts", "nodes", "replacements")}
    good = {field: value for field, value in raw.items() if field not in bad}
    for field in {loc[0] for loc in items}:
        good[field] = [each for i, each in enumerate(raw[field]) if (field, i) not in items]
    return JobStatus.model_validate(good)


def read_operator_status(body: Mapping[str, Any]) -> JobStatus:
    """Operator's part of a job's status, without the ingest's part."""
    status = read_status(body)
    own = [c for c in status.conditions if c.type in names.OPERATOR_CONDITIONS]
    return status.model_copy(
        update={"conditions": own, **dict.fromkeys(names.INGEST_FIELDS)}, deep=True
    )


def dump_status(status: JobStatus) -> dict[str, Any]:
    """Status as JSON for the API."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def build_current_job_name(body: Mapping[str, Any]) -> str:
    """Name of the current Job: that of the attempt in status, or of attempt 0. Works also if the
    spec has become invalid: an earlier Job may run."""
    spec = body.get("spec") or {}
    cut = spec.get("parallelism") or {}
    sizes = ("stages", "replicas", "shard", "context", "tensor")
    in_a_pod = [int(cut.get(size) or 1) for size in ("stagesPerRank", "ranksPerPod")]
    pods = prod(int(cut.get(size) or 1) for size in sizes) // prod(in_a_pod)
    number = (body.get("status") or {}).get("attempt") or 0
    metadata = body["metadata"]
    return build_attempt_name(metadata["name"], metadata["uid"], number, pods)
