"""Reads a PipeMorphJob from its API object, and formats its status for the API."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from pydantic import ValidationError

from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import JobStatus
from pipemorph.errors import InputError
from pipemorph.manifest import describe
from pipemorph_operator import names
from pipemorph_operator.children.naming import attempt_name


def read_job(body: Mapping[str, Any]) -> PipeMorphJob:
    """Parse the job of an API object. Does not check the pod template
    (:func:`~pipemorph_operator.children.pod_template.pod_template` does when it builds pods), nor
    whether the spec allows a plan (:mod:`pipemorph_operator.reconcile.plans`). Raises
    :class:`InputError` with one line that names the field."""
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
        raise InputError(describe(error)) from None
    job.spec.template = template
    return job


_SHOWN = ("state", "ready", "pods", "training", "goodput", "goodputPercent", "usefulTime")
"""Fields of status that only show something, or that their writer writes again."""


def read_status(body: Mapping[str, Any]) -> JobStatus:
    """The status of an API object. What another release has written and this one cannot read is
    left out, where no decision rests on it. Raises :class:`pydantic.ValidationError`."""
    raw = body.get("status") or {}
    try:
        return JobStatus.model_validate(raw)
    except ValidationError as error:
        found = [each["loc"] for each in error.errors()]
    bad = {loc[0] for loc in found if loc[0] in _SHOWN}
    items = {loc[:2] for loc in found if loc[0] in ("attempts", "nodes", "replacements")}
    kept = {field: value for field, value in raw.items() if field not in bad}
    for field in {loc[0] for loc in items}:
        kept[field] = [each for i, each in enumerate(raw[field]) if (field, i) not in items]
    return JobStatus.model_validate(kept)


def operator_part(body: Mapping[str, Any]) -> JobStatus:
    """The part of a job's status that the operator writes, without the ingest's part."""
    status = read_status(body)
    own = [c for c in status.conditions if c.type in names.OPERATOR_CONDITIONS]
    return status.model_copy(
        update={"conditions": own, **dict.fromkeys(names.INGEST_FIELDS)}, deep=True
    )


def dump(status: JobStatus) -> dict[str, Any]:
    """A status as JSON for the API."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def current_name(body: Mapping[str, Any]) -> str:
    """Name of the current Job: that of the attempt in status, or of attempt 0. Also of a job whose
    spec is refused now: a Job of before may run."""
    spec = body.get("spec") or {}
    cut = spec.get("parallelism") or {}
    sizes = ("stages", "replicas", "shard", "context", "tensor")
    in_a_pod = [int(cut.get(size) or 1) for size in ("stagesPerRank", "ranksPerPod")]
    pods = prod(int(cut.get(size) or 1) for size in sizes) // prod(in_a_pod)
    number = (body.get("status") or {}).get("attempt") or 0
    metadata = body["metadata"]
    return attempt_name(metadata["name"], metadata["uid"], number, pods)
