"""`pipemorph advise`: what smaller microbatches and other layers make of every field of a stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipemorph.cli import main
from pipemorph.planning import Link, Policy, Problem, StageTimes, plan
from pipemorph.planning.advice import AdviceOption, compare_changes
from pipemorph.planning.analysis.what_if import (
    OP_TIME_FIELDS,
    apply_layer_split,
    compute_stage_work,
    even_out_stages,
    list_layers,
    shrink_stage,
)
from pipemorph.planning.problem import LayerTimes

GIB = 1 << 30
FULL = StageTimes(
    forward=10,
    backward_input=12,
    backward_weight=8,
    fused_backward=16,
    offload_copy=2,
    in_flight_limit=6,
    device_limit=3,
    recompute_limit=8,
    activation_bytes=GIB,
    reduction=3,
)


def problem(stages: tuple[StageTimes, ...], **more: Any) -> Problem:
    links = (Link(),) * (len(stages) - 1)
    return Problem(**{"microbatches": 12, "stages": stages, "links": links} | more)


def stage(**more: Any) -> StageTimes:
    return StageTimes(**{"forward": 10, "backward_input": 10, "backward_weight": 10} | more)


def found(given: Problem, lever: str) -> list[AdviceOption]:
    return [option for option in compare_changes(given).options if option.lever == lever]


def test_every_field_of_a_stage_follows_the_size_of_its_microbatches() -> None:
    half, whole = shrink_stage(FULL, 2), FULL.model_dump()
    limits = {"in_flight_limit", "device_limit", "recompute_limit"}
    for name in StageTimes.model_fields:
        if name == "reduction":  # Equal bytes of gradients for microbatches of any size.
            assert half.reduction == whole[name] == 3
            continue
        if name == "recompute":
            assert half.recompute is whole[name] is False
            continue
        factor = 2 if name in limits else 0.5
        assert getattr(half, name) == factor * whole[name], name
    bare = stage()
    assert shrink_stage(bare, 2).model_dump(exclude_defaults=True) == dict.fromkeys(
        OP_TIME_FIELDS, 5
    )


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
def test_a_fused_backward_shrinks_with_its_microbatch(policy: str) -> None:
    """A stated fused backward as long as B and W gains the same as one that is not stated."""
    plain = found(problem((stage(),) * 4, policy=policy), "microbatches")
    fused = found(problem((stage(fused_backward=20),) * 4, policy=policy), "microbatches")
    assert [option.makespan for option in fused] == [option.makespan for option in plain]
    # (N + S - 1) (F + BW) for 12, then for 24 of half the size.
    assert fused[2].makespan == (24 + 3) * 15
    assert fused[2].gain == pytest.approx(1 - 27 * 15 / (15 * 30))


def test_twice_as_many_of_half_the_size_are_on_the_device() -> None:
    tight = stage(device_limit=3, offload_copy=1, activation_bytes=GIB)
    half = stage(
        forward=5, backward_input=5, backward_weight=5, device_limit=6, offload_copy=0.5
    )  # fmt: skip
    links = (Link(delay=20), Link(), Link())
    option = found(problem((tight,) * 4, links=links), "microbatches")[2]
    assert option.makespan == plan(problem((half,) * 4, links=links, microbatches=24)).makespan
    assert 3 < max(option.in_flight) <= 6
    assert option.memory <= 1 and option.activation_bytes == max(option.in_flight) * GIB // 2


def test_fused_backward_and_device_limit_go_with_the_layers() -> None:
    """Stage 0 has an embedding worth four of the 40 layers; fused is 3/4 of B and W."""
    layers = (LayerTimes(forward=1, backward_input=1, backward_weight=1, count=40),)
    limits = {"device_limit": 10, "offload_copy": 1.0}
    first = stage(forward=14, backward_input=14, backward_weight=14, fused_backward=21, **limits)
    stages = (first, *[stage(fused_backward=15, **limits)] * 3)
    given = problem(stages, layers=layers, layer_split=(10, 10, 10, 10), policy="1f1b")
    (option,) = found(given, "split")
    assert option.change == "layers 10-10-10-10 → 7-11-11-11"
    new, units = apply_layer_split(given, (7, 11, 11, 11), [1.0] * 4, sized=False)
    assert [each.forward for each in new] == [11, 11, 11, 11]
    assert [each.fused_backward for each in new] == pytest.approx([16.5] * 4)
    assert [each.device_limit for each in new] == [14, 9, 9, 9]
    assert [each.offload_copy for each in new] == units == [0.7, 1.1, 1.1, 1.1]
    assert option.makespan == pytest.approx(15 * (11 + 16.5))


def test_layers_take_what_their_own_stage_saves() -> None:
    """Stage 0 alone fuses at a gain; a layer that goes to stage 1 takes its part there."""
    layers = (LayerTimes(forward=1, backward_input=1, backward_weight=1, count=8),)
    stages = (
        stage(forward=6, backward_input=6, backward_weight=6, fused_backward=9),
        stage(forward=2, backward_input=2, backward_weight=2),
    )
    given = problem(stages, layers=layers, layer_split=(6, 2))
    assert [layer.whole_backward for layer in list_layers(given)] == pytest.approx(
        [1.5] * 6 + [2.0] * 2
    )
    new, _ = apply_layer_split(given, (4, 4), [1.0] * 2, sized=False)
    assert [each.fused_backward for each in new] == pytest.approx([6, 7])
    back, _ = apply_layer_split(given, (6, 2), [1.0] * 2, sized=False)
    assert back[1].fused_backward is None


def test_layers_that_say_more_than_their_stage_share_what_it_has() -> None:
    layers = (LayerTimes(forward=1e12, backward_input=1e12, backward_weight=1e12, count=2),)
    tiny = stage(backward_input=1e-300, backward_weight=0, fused_backward=1e12)
    given = problem((tiny, tiny), layers=layers, layer_split=(1, 1), policy="1f1b")
    assert [layer.fused_backward for layer in list_layers(given)] == [1e12, 1e12]
    assert compare_changes(given).options


def test_even_stages_have_even_fused_backwards() -> None:
    stages = (stage(fused_backward=40), stage(fused_backward=18), stage(), stage())
    assert [each.fused_backward for each in even_out_stages(stages)] == [24.5] * 4
    assert all(each.fused_backward is None for each in even_out_stages((stage(), stage())))
    (option,) = found(problem(stages, policy="1f1b"), "split")
    assert option.change == "even stages (slowest is 1.45× the mean)"
    assert option.makespan == 15 * 34.5 and option.gain > 0.2


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("gpipe", 26), ("1f1b", 26), ("pipemorph", 26), ("zero-bubble", 30)],
)
def test_a_stage_works_as_its_policy_runs_it(policy: str, expected: float) -> None:
    assert compute_stage_work(FULL, Policy(policy)) == expected
    slow = FULL.model_copy(update={"fused_backward": 30})
    assert compute_stage_work(slow, Policy.ONE_F_ONE_B) == 40
    assert compute_stage_work(slow, Policy.PIPEMORPH) == 30


def test_more_than_can_be_planned_is_reported_in_words(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipemorph.planning.problem.MAX_CELLS", 4 * 30)
    file = tmp_path / "problem.json"
    file.write_text(problem((stage(),) * 4).model_dump_json(exclude_none=True))
    assert main(["advise", str(file), "--output", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    words = "microbatches is 48; at 4 stages at most 30 can be planned"
    assert [text for text in said["missing"] if text.startswith("microbatches")] == [
        f"microbatches, 12 → 48, batch 4×: {words}",
        f"microbatches, 12 → 48 of 1/4 the size: {words}",
    ]
    assert len([each for each in said["options"] if each["lever"] == "microbatches"]) == 2
