"""Diagnosis of a recording: slowdown, bubble, causes and advice."""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.diagnose.adapting import describe_change
from pipemorph.diagnose.analysis.causes import Cause, find_causes
from pipemorph.diagnose.analysis.remedies import Remedy, find_remedies
from pipemorph.diagnose.analysis.slowdown import (
    Slowdown,
    StepSimulator,
    analyse_slowdown,
    compute_bubble_fraction,
)
from pipemorph.diagnose.analysis.steps import StepSet, select_steps
from pipemorph.diagnose.formats.registry import Recording
from pipemorph.diagnose.operation import DATA, GC, WEIGHT
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis. ``bubble_fraction``: idle share of the workers between the first
    compute op of a replica and its last. ``notes``: what cannot be said, and what was omitted."""

    format_name: str
    steps: StepSet
    slowdown: Slowdown
    bubble_fraction: float
    causes: list[Cause]
    advice: list[Remedy]
    notes: list[str]
    schedule: str = ""
    """Framework and schedule of an observed job; empty if the recording does not say."""

    @property
    def change(self) -> str:
        """The one change that lets PipeMorph act on an observed job, with its predicted gain."""
        return ": ".join(filter(None, describe_change(self.schedule, self.advice, self.notes)))

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
    causes = find_causes(simulator)
    advice, more = find_remedies(simulator, causes)
    return Diagnosis(
        recording.format_name,
        steps,
        analyse_slowdown(simulator),
        compute_bubble_fraction(steps),
        causes,
        advice,
        [*recording.notes, *steps.notes, *more, *list_unknowns(steps)],
        recording.table.schedule,
    )


def list_unknowns(steps: StepSet) -> list[str]:
    """Sentences on what cannot be known, as the recording lacks it."""
    codes = {op.optype for op in steps.steps[0].ops}
    notes = []
    if steps.replicas == 1:
        notes.append(
            "With one replica, a slow device cannot be distinguished from a stage with more work,"
            " unless it became slow during the recording."
        )
    if CODE_OF_OPTYPE[WEIGHT] not in codes:
        notes.append("Gradients of weights are part of the backwards: their share is not known.")
    if missing := [name for name in (GC, DATA) if CODE_OF_OPTYPE[name] not in codes]:
        notes.append(
            f"No {' and no '.join(missing)} ops: such time counts to the ops or the gaps around it."
        )
    hidden = sum(not op.complete for op in steps.steps[0].ops)
    if hidden:
        notes.append(
            f"{hidden} receives of a step were complete before they were waited for: how long their"
            " transfers took is not known."
        )
    notes.append("Memory is not recorded: a plan that needs more than today may not fit.")
    return notes
