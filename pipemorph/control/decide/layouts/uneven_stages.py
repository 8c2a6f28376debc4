"""Describes a stage that takes longer than the others by the work that it holds: more layers, an
embedding, the loss head. Pure."""

from __future__ import annotations

from statistics import median

from pipemorph.control.decide.layouts.layer_split import LayerSplit
from pipemorph.protocol import SuggestedSplit

LEAST_UNEVENNESS = 1.1
"""Ratio of the slowest stage to the median of the others from which it is named."""
LEAST_OVERHEAD, LEAST_GAIN = 0.05, 0.01
"""Fraction of the slowest stage's time from which its work besides layers is named; and that which
another split must save."""


def describe_uneven_stages(split: LayerSplit) -> str:
    """Describe the slowest stage: its time beyond the others, the part of it that no change of
    layers can move, and the best split of the layers. Empty if the stages are about equal."""
    seconds = split.stage_seconds
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    others = [took for stage, took in enumerate(seconds) if stage != slowest]
    usual = median(others) if others else 0.0
    if not usual or seconds[slowest] < LEAST_UNEVENNESS * usual:
        return ""
    text = f"stage {slowest} takes {_format_ms(seconds[slowest])} of a microbatch,"
    text += f" {seconds[slowest] / usual:.2g} times the others' median"
    if split.spec.is_observed:
        return text
    if split.spec.parallelism.layers is None:
        return f"{text}; with parallelism.layers, PipeMorph says which split would help"
    fixed = split.overhead_seconds[slowest]
    if fixed >= LEAST_OVERHEAD * seconds[slowest]:
        text += f"; {_format_ms(fixed)} beyond its {split.held_layers[slowest]} layers, by the time"
        text += f" of the fastest stage, cannot move ({_name_overhead(slowest, len(seconds))})"
    if split.best_counts == split.held_layers or split.best_gain < LEAST_GAIN:
        return f"{text}; no other split of the layers is faster"
    text += f"; {SuggestedSplit(split.best_counts, split.best_gain).format_text()}"
    if not split.spec.adaptation.relayout:
        text += "; adaptation.relayout moves layers"
    return text


def _format_ms(seconds: float) -> str:
    # Rounded, so that a message does not change with every sample.
    return f"{float(f'{1e3 * seconds:.2g}'):g} ms"


def _name_overhead(stage: int, stages: int) -> str:
    """Name the work besides layers that a stage may have."""
    if stage == stages - 1:
        return "the loss head"
    return "the embedding" if stage == 0 else "other work or a slower device"
