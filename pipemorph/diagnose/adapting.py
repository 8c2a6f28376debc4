"""Adapting an observed job: what PipeMorph's runtime would give, and the change that brings it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from pipemorph.diagnose.analysis.causes import find_causes
from pipemorph.diagnose.analysis.remedies import HALF, NOT_COMPARED, Remedy, find_remedies
from pipemorph.diagnose.analysis.slowdown import StepSimulator
from pipemorph.diagnose.analysis.steps import select_steps
from pipemorph.diagnose.operation import Operation
from pipemorph.diagnose.operation_table import OperationTable

_CHANGES = {
    "torch": "replace {}(stage, …) by pipemorph_trainer.torch.AdaptiveSchedule(stage, …), and start"
    " the ranks under pipemorph serve",
    "torchtitan": "set config.model_spec.pipelining_fn to pipemorph_trainer.torch.titan's, in place"
    " of {}, and start the ranks under pipemorph serve",
    "megatron-core": "an integration, as Megatron-Core has no hook for the order of ops ({}"
    " computes it), a backward in two parts (backward_step is whole) or sends that do not block"
    " (P2PCommunicator can be replaced)",
    "deepspeed": "an integration, as DeepSpeed has no hook for the order of ops"
    " ({}.train_batch runs TrainSchedule), a backward in two parts (_exec_backward_pass is whole)"
    " or sends that do not block (p2p.send does)",
}
"""Change by the framework that schedules the ops. ``{}``: its schedule, as observed."""


class AdaptingPrediction(NamedTuple):
    """Gain of adapting. ``seconds``: of a step as it ran; ``predicted``: under PipeMorph; ``gain``:
    share of the time that it saves; ``error``: of ``predicted``, seconds. ``change``: the one
    change that is needed; ``promise``: the prediction in words, empty if there is no gain."""

    seconds: float
    predicted: float
    gain: float
    error: float
    change: str
    promise: str


def predict_adapting(operations: Iterable[Operation]) -> AdaptingPrediction:
    """Predict what adapting would give, from the ops of some steps of all workers.

    Raises :class:`~pipemorph.errors.InputError` if they have no complete step of a pipeline.
    """
    table = OperationTable()
    for op in operations:
        table.append_operation(op)
    simulator = StepSimulator(select_steps(table))
    advice, notes = find_remedies(simulator, find_causes(simulator))
    seconds = fmean(step.span for step in simulator.set.steps)
    change = describe_change(table.schedule, advice, notes)
    best = max((r for r in advice if r.adapts), key=lambda remedy: remedy.gain, default=None)
    if best is None:
        return AdaptingPrediction(seconds, seconds, 0.0, 0.0, *change)
    return AdaptingPrediction(seconds, best.predicted_seconds, best.gain, best.error, *change)


def describe_change(
    schedule: str, advice: Sequence[Remedy], notes: Sequence[str]
) -> tuple[str, str]:
    """Describe the one change that lets PipeMorph act, and its predicted gain, if there is any.
    ``schedule``: framework and schedule of an observed job; without them both texts are empty.
    ``notes``: sentences on what cannot be predicted."""
    framework, _, name = schedule.partition(" ")
    if framework not in _CHANGES:
        return "", ""
    found = sorted((r for r in advice if r.adapts), key=lambda remedy: -remedy.gain)
    change = _CHANGES[framework].format(name or framework)
    if any(note.startswith(NOT_COMPARED) for note in notes):
        return change, "what it would give cannot be predicted"
    if not found:
        return "there is nothing to gain: PipeMorph's best plan saves less than 1% of a step", ""
    half = ", if " + HALF if any(HALF in remedy.condition for remedy in found) else ""
    return change, "; ".join(map(_format_gain, found)) + half


def _format_gain(remedy: Remedy) -> str:
    where = "with any memory" if "memory" in remedy.condition else "within today's memory"
    return f"{format_prediction(remedy)} {where}"


def format_prediction(remedy: Remedy) -> str:
    """Predicted time of a step and gain, each with its error if that is known."""
    seconds, gain = format_seconds(remedy.predicted_seconds), f"{remedy.gain:.1%}"
    if remedy.error:
        share = remedy.error * (1 - remedy.gain) / remedy.predicted_seconds
        seconds += f" ± {format_seconds(remedy.error)}"
        gain += f" ± {share:.1%}"
    return f"{seconds} a step, {gain} less"


def format_seconds(seconds: float) -> str:
    """Seconds in a unit that fits them."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"
