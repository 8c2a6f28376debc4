"""Manifests of jobs by their spec."""

from __future__ import annotations

from typing import Any

from pipemorph.spec.job_spec import PipeMorphJob


def manifest_of(spec: dict[str, Any], name: str = "gpt", **metadata: str) -> dict[str, Any]:
    kind = {"apiVersion": "pipemorph.io/v1alpha1", "kind": "PipeMorphJob"}
    return {**kind, "metadata": {"name": name, **metadata}, "spec": spec}


def job_of(spec: dict[str, Any], name: str = "gpt", **metadata: str) -> PipeMorphJob:
    return PipeMorphJob.model_validate(manifest_of(spec, name, **metadata))
