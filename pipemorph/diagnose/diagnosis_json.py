"""Diagnosis as JSON: the output of ``pipemorph diagnose --output json``."""

from __future__ import annotations

from typing import Any

from pipemorph.diagnose.diagnosis import Diagnosis
from pipemorph.planning.formats.torch_csv import dump_csv

DIGITS = 9


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Fields of a diagnosis. Times in seconds, per step; shares of a step as it ran."""
    slowdown, steps = diagnosis.slowdown, diagnosis.steps
    return {
        "format": diagnosis.format_name,
        "stages": steps.stages,
        "replicas": steps.replicas,
        "microbatches": steps.microbatches,
        "steps": [step.step for step in steps.steps],
        "seconds": _round(slowdown.span),
        "seconds_without_gaps": _round(slowdown.recorded),
        "seconds_ideal": _round(slowdown.ideal),
        "slowdown": _round(slowdown.total),
        "launch_slowdown": _round(slowdown.launch),
        "slowdown_by": {
            "optype": _round_values(slowdown.by_optype),
            "stage": _round_values(slowdown.by_stage),
            "dp_rank": _round_values(slowdown.by_dp_rank),
            "worker": _round_values(slowdown.by_worker),
        },
        "m_s": _round(slowdown.m_s),
        "m_w": _round(slowdown.m_w),
        "slowest_workers": [steps.workers[worker].key for worker in slowdown.slowest],
        "bubble_fraction": _round(diagnosis.bubble_fraction),
        "ideal_bubble_fraction": _round(diagnosis.ideal_bubble_fraction),
        "causes": [
            {
                "cause": cause.cause,
                "where": cause.where,
                "share": _round(cause.share),
                "seconds": _round(cause.seconds),
                "since_step": cause.since,
            }
            for cause in diagnosis.causes
        ],
        "advice": [
            {
                "change": remedy.change,
                "predicted_seconds": _round(remedy.predicted_seconds),
                "gain": _round(remedy.gain),
                "error_seconds": _round(remedy.error) if remedy.adapts else None,
                "condition": remedy.condition or None,
                "schedule": None if remedy.schedule is None else dump_csv(remedy.schedule),
            }
            for remedy in diagnosis.advice
        ],
        "schedule": diagnosis.schedule or None,
        "with_pipemorph": diagnosis.change or None,
        "notes": diagnosis.notes,
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _round_values(values: dict[Any, float]) -> dict[str, float | None]:
    return {str(key): _round(value) for key, value in values.items()}
