"""Diagnosis of a recording: slowdown, bubble, causes and advice."""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.diagnose.analysis.causes import Cause, find_causes
from pipemorph.diagnose.analysis.slowdown import (
    Slowdown,
    StepSimulator,
    analyse_slowdown,
    compute_bubble_fraction,
)
from pipemorph.diagnose.analysis.steps import StepSet, select_steps
from pipemorph.diagnose.formats.registry import Recording


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis. ``bubble_fraction``: idle share of the workers between the first
    compute op of a replica and its last. ``notes``: what cannot be said, and what was left out."""

    format_name: str
    steps: StepSet
    slowdown: Slowdown
    bubble_fraction: float
    causes: list[Cause]
    notes: list[str]

    @property
    def ideal_bubble_fraction(self) -> float:
        """``(p - 1) / (m + p - 1)`` for *p* stages and *m* microbatches of equal times; with *v*
        chunks per rank, of ``v·m`` shorter ops."""
        p = self.steps.stages
        m = self.steps.microbatches * (len(self.steps.chunk_stages) // p)
        return (p - 1) / (m + p - 1)


def diagnose(recording: Recording) -> Diagnosis:
    """Diagnose a recording. Raises :class:`~pipemorph.errors.InputError` if it has no complete
    step of a pipeline."""
    steps = select_steps(recording.table)
    simulator = StepSimulator(steps)
    return Diagnosis(
        recording.format_name,
        steps,
        analyse_slowdown(simulator),
        compute_bubble_fraction(steps),
        find_causes(simulator),
        [*recording.notes, *steps.notes],
    )
