"""Computes stages with smaller microbatches or other layers, for ``advice``.

Times scale with the work. Limits stay constant in bytes, so twice as many microbatches of half the
size fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import floor

from pipemorph.planning.ir import Policy
from pipemorph.planning.problem import Problem, StageTimes

OP_TIME_FIELDS = ("forward", "backward_input", "backward_weight")


def compute_stage_work(stage: StageTimes, policy: Policy) -> float:
    """Compute time of a stage per microbatch, with the policy's form of the backward."""
    if policy in {Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.ONE_F_ONE_B_INTERLEAVED}:
        return stage.forward + stage.whole_backward
    if policy is Policy.PIPEMORPH:
        return stage.forward + stage.least_backward
    return stage.forward + stage.backward_input + stage.backward_weight


def shrink_stage(stage: StageTimes, factor: float) -> StageTimes:
    """Stage with ``1/factor`` of its work, in time and bytes: smaller microbatches or fewer
    layers."""
    size, copy, fused = stage.activation_bytes, stage.offload_copy, stage.fused_backward
    update: dict[str, float | int | None] = {
        kind: getattr(stage, kind) / factor for kind in OP_TIME_FIELDS
    } | {
        "fused_backward": None if fused is None else fused / factor,
        "offload_copy": None if copy is None else copy / factor,
        "activation_bytes": None if size is None else max(1, int(size / factor)),
    }
    return stage.model_copy(update=update | _scale_limits(stage, factor))


def even_out_stages(stages: Sequence[StageTimes]) -> tuple[StageTimes, ...]:
    """Stages with the mean time of every op; bytes per microbatch do not change."""

    def average_time(kind: str) -> float:
        return float(sum(getattr(stage, kind) for stage in stages)) / len(stages)

    update: dict[str, float | None] = {kind: average_time(kind) for kind in OP_TIME_FIELDS}
    if any(stage.fused_backward is not None for stage in stages):
        update["fused_backward"] = average_time("whole_backward")
    return tuple(stage.model_copy(update=update) for stage in stages)


def list_layers(problem: Problem) -> list[StageTimes]:
    """Layers of the problem, one entry each. The fused backward of a stage is distributed over its
    present layers in proportion to their backward times, and moves with them."""
    layers = [each for each in problem.layers or () for _ in range(each.count)]
    found = []
    for stage, part in zip(problem.stages, slice_by_counts(problem.layer_split or ()), strict=True):
        own = [layer.backward_input + layer.backward_weight for layer in layers[part]]
        # The layers' times may add up to more than the stage's: distribute at most the stage's.
        whole = max(stage.backward_input + stage.backward_weight, sum(own))
        for layer, backward in zip(layers[part], own, strict=True):
            fused = stage.fused_backward
            if fused is not None:
                fused *= backward / whole if whole else 0.0
            found.append(
                StageTimes(
                    forward=layer.forward,
                    backward_input=layer.backward_input,
                    backward_weight=layer.backward_weight,
                    activation_bytes=layer.activation_bytes,
                    fused_backward=fused,
                )
            )
    return found


def apply_layer_split(
    problem: Problem, counts: Sequence[int], units: Sequence[float], *, sized: bool
) -> tuple[tuple[StageTimes, ...], list[float]]:
    """Stages with ``counts`` layers each, and the memory of a microbatch on each of them.

    ``units``: that memory today, in bytes if ``sized`` (all stages and layers have a size), else in
    any unit and scaled by the number of layers. Other time and memory of a stage do not change.
    """
    layers = list_layers(problem)
    stages, found = [], []
    for stage, unit, was, now in zip(
        problem.stages,
        units,
        slice_by_counts(problem.layer_split or ()),
        slice_by_counts(counts),
        strict=True,
    ):
        before, after = layers[was], layers[now]
        update: dict[str, float | int | None] = {
            kind: _exchange_layers(stage, before, after, kind) for kind in OP_TIME_FIELDS
        }
        if any(each.fused_backward is not None for each in (stage, *after)):
            update["fused_backward"] = _exchange_layers(stage, before, after, "whole_backward")
        if sized:
            size = max(1.0, unit - _sum_activation_bytes(before) + _sum_activation_bytes(after))
            update["activation_bytes"] = round(size)
        else:
            size = unit * len(after) / len(before)
        if stage.offload_copy is not None:
            update["offload_copy"] = stage.offload_copy * size / unit
        stages.append(stage.model_copy(update=update | _scale_limits(stage, unit / size)))
        found.append(size)
    return tuple(stages), found


def slice_by_counts(counts: Sequence[int]) -> list[slice]:
    """Consecutive slices: ``(2, 3)`` → ``0:2`` and ``2:5``."""
    ends = list(accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _exchange_layers(
    stage: StageTimes, before: Sequence[StageTimes], after: Sequence[StageTimes], kind: str
) -> float:
    fixed = max(0.0, float(getattr(stage, kind) - sum(getattr(layer, kind) for layer in before)))
    return fixed + float(sum(getattr(layer, kind) for layer in after))


def _sum_activation_bytes(layers: Sequence[StageTimes]) -> int:
    return sum(layer.activation_bytes or 0 for layer in layers)


def _scale_limits(stage: StageTimes, share: float) -> dict[str, float | int | None]:
    """Limits of the stage if ``share`` times as many microbatches fit into the same bytes."""

    def scale_limit(limit: int | None) -> int | None:
        return None if limit is None else max(1, floor(limit * share + 1e-9))

    return {
        "in_flight_limit": scale_limit(stage.in_flight_limit),
        "device_limit": scale_limit(stage.device_limit),
        "recompute_limit": scale_limit(stage.recompute_limit),
    }
