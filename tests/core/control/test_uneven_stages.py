"""A stage that takes longer than the others by its work: what is said of it, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from plant_support import Plant, spec

from pipemorph.control.decide.layouts.layer_split import LayerSplit
from pipemorph.control.decide.layouts.stage_overhead import StageOverhead
from pipemorph.control.decide.layouts.uneven_stages import describe_uneven_stages
from pipemorph.planning import Policy, StageTimes
from pipemorph.spec.layout import Layout
from pipemorph.views.status.summary import StatusInput, judge_conditions

EVEN = (0.03, 0.03, 0.03, 0.03)
HEAD = (0.03, 0.03, 0.03, 0.045)


def make_stages(seconds: Sequence[float]) -> tuple[StageTimes, ...]:
    return tuple(
        StageTimes(forward=each / 3, backward_input=each / 3, backward_weight=each / 3)
        for each in seconds
    )


def describe(
    seconds: Sequence[float],
    layers: int | None,
    held: tuple[int, ...] = (),
    *,
    observed: bool = False,
    **fields: Any,
) -> str:
    """Describe stages that take ``seconds`` while they hold ``held`` layers; empty: evenly many.
    Before, they took those of HEAD with evenly many."""
    job = spec(parallelism={"stages": 4, "layers": layers}, **fields)
    if observed:
        job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"iterations": 0})})
    first = make_stages(HEAD if held else seconds)
    overhead = StageOverhead(layers).with_measured_times(first, Policy.PIPEMORPH)
    layout = Layout.from_parallelism(job.parallelism)
    layout = layout.with_layers(held) if held else layout
    return describe_uneven_stages(LayerSplit(job, layout, make_stages(seconds), overhead))


def test_a_loss_head_and_the_split_that_helps_are_named() -> None:
    text = describe(HEAD, 32)
    assert text == (
        "stage 3 takes 45 ms of a microbatch, 1.5 times the others' median; 15 ms beyond its 8"
        " layers, by the time of the fastest stage, cannot move (the loss head);"
        " with 9, 9, 9, 5 layers the slowest stage would take 25% less;"
        " adaptation.relayout moves layers"
    )
    relayout = {"adaptation": {"relayout": True}, "failurePolicy": {"maxRestarts": 1}}
    moving = describe(HEAD, 32, **relayout)
    assert moving == text.removesuffix("; adaptation.relayout moves layers")
    slow = describe((0.1, 0.1, 0.1, 0.154), None)
    assert slow.startswith("stage 3 takes 150 ms of a microbatch")
    assert (
        describe(HEAD, None, observed=True)
        == "stage 3 takes 45 ms of a microbatch, 1.5 times the others' median"
    )


@pytest.mark.parametrize(
    ("seconds", "layers", "held", "words"),
    [
        (EVEN, 32, (), ""),
        ((0.03, 0.03, 0.03, 0.0325), 32, (), ""),
        ((0.0, 0.0, 0.0, 0.0), 32, (), ""),
        ((0.045, 0.03, 0.03, 0.03), 32, (), "cannot move (the embedding)"),
        ((0.03, 0.045, 0.03, 0.03), 32, (), "(other work or a slower device)"),
        (HEAD, 4, (), "; no other split of the layers is faster"),
        (HEAD, None, (), "; with parallelism.layers, PipeMorph says which split would help"),
        ((0.0338, 0.0338, 0.0338, 0.0338), 32, (9, 9, 9, 5), ""),
        (
            (0.0262, 0.0338, 0.0338, 0.0412),
            32,
            (7, 9, 9, 7),
            "; 15 ms beyond its 7 layers",
        ),
    ],
)
def test_what_is_said_of_stages(
    seconds: Sequence[float], layers: int | None, held: tuple[int, ...], words: str
) -> None:
    found = describe(seconds, layers, held)
    assert words in found
    assert bool(found) is bool(words)


def test_a_condition_names_the_longest_stage_and_is_true() -> None:
    """Unequal work is no fault."""
    plant = Plant(spec(parallelism={"stages": 4, "layers": 32}))

    def judge() -> tuple[str, str, str]:
        source = StatusInput(plant.controller, plant.now)
        view = plant.controller.get_job_view(plant.now)
        return judge_conditions(source, view, plant.now)["StagesEven"]

    assert plant.controller.describe_uneven_stages() == "", "nothing measured"
    plant.run(12)
    assert judge() == ("True", "NoStageSlow", "4 stages, none slow")
    plant = Plant(spec(parallelism={"stages": 4, "layers": 32}))
    plant.ops = list(make_stages(HEAD))
    plant.run(12)
    status, reason, message = judge()
    assert (status, reason) == ("True", "UnequalWork")
    assert message.startswith("stage 3 takes 45 ms of a microbatch, 1.5 times the others")
