"""`pipemorph advise`: the split is optimal, levers keep the caps, reports are read back."""

from __future__ import annotations

import json
import random
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.local.results.measured_problem import is_run_report
from pipemorph.planning import Link, OpKind, Problem, StageTimes, plan, simulate
from pipemorph.planning.advice import AdviceOption, compare_changes
from pipemorph.planning.analysis.partition import split_layers, split_layers_over_ranks
from pipemorph.planning.problem import LayerTimes


def slowest(times: list[float], fixed: list[float], cuts: list[int]) -> float:
    parts = pairwise(cuts)
    return max(f + sum(times[a:b]) for f, (a, b) in zip(fixed, parts, strict=True))


def test_the_split_is_the_best_of_all() -> None:
    """Splits of all kinds are tried, for layers that take no time and stages with more to do."""
    rng = random.Random(1)
    for _ in range(600):
        stages = rng.randint(1, 4)
        layers = rng.randint(stages, 8)
        times = [rng.choice([0, 1, 2, 3.5, 7, rng.random() * 10]) for _ in range(layers)]
        fixed = [float(rng.choice([0, 0, 1, 5])) for _ in range(stages)]
        counts = split_layers(times, fixed)
        assert len(counts) == stages and sum(counts) == layers and min(counts) >= 1
        best = min(
            slowest(times, fixed, [0, *cut, layers])
            for cut in combinations(range(1, layers), stages - 1)
        )
        assert slowest(times, fixed, [0, *accumulate(counts)]) == pytest.approx(best)


def test_the_other_stages_are_even_too() -> None:
    """A layer of 5 is the slowest stage however the rest is cut."""
    assert split_layers([1.0, 1.0, 1.0, 1.0, 5.0], [0.0] * 3) == (2, 2, 1)


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(ValueError, match="there are 1 layers for 2 stages"):
        split_layers([1.0], [0.0, 0.0])


GIB = 1 << 30


def stage(scale: float = 1.0, **more: Any) -> StageTimes:
    return StageTimes(
        forward=10 * scale, backward_input=10 * scale, backward_weight=10 * scale, **more
    )


def problem(stages: tuple[StageTimes, ...], **more: Any) -> Problem:
    links = (Link(delay=20), *[Link()] * (len(stages) - 2))
    return Problem(microbatches=12, stages=stages, links=links, **more)


def by_lever(options: tuple[AdviceOption, ...], lever: str) -> list[AdviceOption]:
    return [option for option in options if option.lever == lever]


def test_today_is_the_plan_of_the_problem() -> None:
    given = problem((stage(in_flight_limit=6, activation_bytes=GIB),) * 4)
    today = compare_changes(given).options[0]
    planned = plan(given)
    assert (today.makespan, today.gain, today.memory) == (planned.makespan, 0, 1)
    assert today.in_flight == planned.schedule.count_in_flight_peaks()
    assert today.activation_bytes == 6 * GIB


def test_guided_dispatch_is_compared_as_it_runs() -> None:
    given = problem((stage(in_flight_limit=5),) * 4, policy="zero-bubble", dispatch="guided")
    today = compare_changes(given).options[0]
    ran = simulate(plan(given).schedule, given, given.dispatch)
    assert (today.makespan, today.bubble_fraction) == (ran.makespan, ran.bubble_fraction)


def test_more_microbatches() -> None:
    given = problem((stage(in_flight_limit=6, activation_bytes=GIB),) * 4)
    found = by_lever(compare_changes(given).options, "microbatches")
    assert [option.batch for option in found] == [2, 4, 1, 1]
    for option in found:
        assert option.bubble_fraction < 0.122
        assert option.memory <= 1
    twice = plan(given.model_copy(update={"microbatches": 24}))
    assert found[0].makespan == twice.makespan
    assert found[0].gain == pytest.approx(1 - twice.makespan / 2 / 410)
    # Half the size: twice as many fit into the same bytes.
    assert max(found[2].in_flight) > 6 and found[2].activation_bytes <= 6 * GIB


def test_another_split_and_its_memory() -> None:
    """Stage 0 has an embedding worth four layers. Caps follow the size of a stage."""
    layers = (LayerTimes(forward=1, backward_input=1, backward_weight=1, count=40),)
    stages = (stage(1.4, in_flight_limit=10), *[stage(in_flight_limit=10)] * 3)
    given = problem(stages, layers=layers, layer_split=(10, 10, 10, 10))
    (found,) = by_lever(compare_changes(given).options, "split")
    assert found.change == "layers 10-10-10-10 → 7-11-11-11"
    assert found.gain > 0.05
    even = stage(1.1, in_flight_limit=9)
    assert found.makespan == plan(problem((even, even, even, even))).makespan


def test_a_split_that_is_the_best_already() -> None:
    layers = (LayerTimes(forward=1, backward_input=1, backward_weight=1, count=40),)
    given = problem((stage(),) * 4, layers=layers, layer_split=(10, 10, 10, 10))
    advice = compare_changes(given)
    assert not by_lever(advice.options, "split")
    assert "the split 10-10-10-10 is the best for its slowest stage" in advice.missing_options


def test_uneven_stages_without_layers() -> None:
    advice = compare_changes(problem((stage(2), stage(), stage(), stage())))
    (found,) = by_lever(advice.options, "split")
    assert found.note == "at best" and found.gain > 0.2
    assert any("layer_split" in text for text in advice.missing_options)


def test_offload_lifts_the_cap_and_pays_its_copies() -> None:
    tight = stage(in_flight_limit=3, activation_bytes=GIB)
    free = compare_changes(problem((tight,) * 4))
    (dear,) = by_lever(
        compare_changes(problem((tight.model_copy(update={"offload_copy": 5.0}),) * 4)).options,
        "offload",
    )
    (cheap,) = by_lever(free.options, "offload")
    # Slower than without a limit: microbatches that wait for their W are on the device too.
    assert plan(problem((stage(),) * 4)).makespan <= cheap.makespan < free.options[0].makespan
    assert cheap.gain > dear.gain > 0
    assert max(cheap.in_flight) == 3 and cheap.activation_bytes == 3 * GIB
    assert cheap.memory == 1
    assert cheap.host_bytes is not None and cheap.host_bytes > 3 * GIB
    assert any("offload_copy" in text for text in free.missing_options)
    assert free.best_option is not None and free.best_option.gain >= cheap.gain


def test_without_a_cap_offload_is_shown_for_the_memory_it_saves() -> None:
    given = stage(activation_bytes=GIB, offload_copy=0.5)
    advice = compare_changes(problem((given,) * 4))
    (found,) = by_lever(advice.options, "offload")
    assert max(found.in_flight) == 2 and found.memory < 0.5
    assert found.host_bytes is not None and found.host_bytes > 0
    assert any("offload saves memory, not time" in text for text in advice.missing_options)


def test_offload_is_predicted_as_the_controller_predicts_it() -> None:
    tight = stage(in_flight_limit=3, offload_copy=0.5)
    (found,) = by_lever(compare_changes(problem((tight,) * 4)).options, "offload")
    away = tight.model_copy(update={"in_flight_limit": None, "device_limit": 3})
    assert found.makespan == plan(problem((away,) * 4)).makespan


def test_the_best_takes_no_more_memory_and_keeps_the_batch() -> None:
    advice = compare_changes(problem((stage(),) * 4))
    best = advice.best_option
    assert best is None or (best.memory <= 1 and best.batch == 1)
    assert any(option.batch == 4 and option.gain > 0.05 for option in advice.options)


def loads(times: list[float], fixed: list[float], counts: Any, placement: Any) -> list[float]:
    """The time of each rank."""
    ends = [0, *accumulate(counts)]
    found = [0.0] * (max(placement) + 1)
    for i, rank in enumerate(placement):
        found[rank] += fixed[i] + sum(times[ends[i] : ends[i + 1]])
    return found


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1, 0)])
def test_a_split_over_ranks_is_near_the_best_of_all(placement: tuple[int, ...]) -> None:
    """The split is found step by step; equal layers, the usual case, are split at best."""
    rng = random.Random(2)
    for equal in [True] * 60 + [False] * 120:
        layers = rng.randint(4, 9)
        times = [1.0 if equal else rng.choice([1, 2, 3.5, 7]) for _ in range(layers)]
        fixed = [float(rng.choice([0, 0, 1, 5])) for _ in placement]
        counts = split_layers_over_ranks(times, fixed, placement)
        assert sum(counts) == layers and min(counts) >= 1
        slowest = max(loads(times, fixed, counts, placement))
        splits = (
            [end - start for start, end in pairwise([0, *cut, layers])]
            for cut in combinations(range(1, layers), 3)
        )
        best = min(max(loads(times, fixed, each, placement)) for each in splits)
        assert slowest <= best * (1 if equal else 1.5) + 1e-9, (times, fixed, counts)


def interleaved(stages: tuple[StageTimes, ...], **more: Any) -> Problem:
    return problem(stages, ranks=len(stages) // 2, **more)


def test_ranks_with_several_stages_are_planned_as_such() -> None:
    given = interleaved((stage(in_flight_limit=6, activation_bytes=GIB),) * 4)
    advice = compare_changes(given)
    today, planned = advice.options[0], plan(given)
    assert (today.makespan, today.gain, today.memory) == (planned.simulation.makespan, 0, 1)
    assert today.bubble_fraction == planned.simulation.bubble_fraction
    assert today.in_flight == planned.schedule.count_in_flight_peaks()
    # Sum over both stages of a rank at one moment, which is less than the sum of their peaks.
    assert today.activation_bytes == held_by_ranks(given) * GIB
    assert today.activation_bytes <= max(map(sum, peaks_by_rank(given))) * GIB
    found = by_lever(advice.options, "microbatches")
    twice = plan(given.model_copy(update={"microbatches": 24}))
    assert found[0].makespan == twice.simulation.makespan
    assert [option.batch for option in found] == [2, 4, 1, 1]
    assert not by_lever(advice.options, "split"), "its ranks are even"


def held_by_ranks(given: Problem) -> int:
    """Peak number of microbatches on any rank, counted op by op."""
    most = 0
    for ops in plan(given).schedule.ranks:
        now = 0
        for op in ops:
            now += op.kind is OpKind.F
            most = max(most, now)
            now -= op.kind in (OpKind.W, OpKind.BW)
    return most


def peaks_by_rank(given: Problem) -> list[list[int]]:
    schedule = plan(given).schedule
    peaks = schedule.count_in_flight_peaks()
    ranks: list[list[int]] = [[] for _ in schedule.ranks]
    for rank, peak in zip(schedule.placement, peaks, strict=True):
        ranks[rank].append(peak)
    return ranks


def test_even_ranks_may_have_uneven_stages() -> None:
    """A rank with a long and a short stage is no slower than one with two equal ones."""
    uneven = (stage(1.5), stage(), stage(0.5), stage())
    assert not by_lever(compare_changes(interleaved(uneven)).options, "split")
    (found,) = by_lever(compare_changes(interleaved((stage(2), *[stage()] * 3))).options, "split")
    assert found.change == "even stages (slowest rank is 1.20× the mean)" and found.gain > 0.1


def test_layers_move_between_ranks() -> None:
    """Stage 0 has an embedding worth four layers: rank 0 gives two of its layers to rank 1."""
    layers = (LayerTimes(forward=1, backward_input=1, backward_weight=1, count=40),)
    given = interleaved((stage(1.4), *[stage()] * 3), layers=layers, layer_split=(10, 10, 10, 10))
    (found,) = by_lever(compare_changes(given).options, "split")
    counts = [int(count) for count in found.change.split("→ ")[1].split("-")]
    assert counts[0] + counts[2] == 18 and counts[1] + counts[3] == 22
    assert found.gain > 0.03
    best = given.model_copy(update={"layer_split": tuple(counts)})
    best = best.model_copy(
        update={
            "stages": tuple(stage(n / 10 + (0.4 if i == 0 else 0)) for i, n in enumerate(counts))
        }
    )
    assert any(
        "the best for its slowest rank" in text for text in compare_changes(best).missing_options
    )


@pytest.mark.parametrize("policy", ["pipemorph", "1f1b-interleaved", "zero-bubble-v"])
def test_offload_and_policies_of_several_stages_per_rank(policy: str) -> None:
    """A rule takes no account of limits: then offload changes what is held, not the order."""
    tight = stage(in_flight_limit=2, activation_bytes=GIB, offload_copy=0.5)
    limited = policy == "pipemorph"
    placement = {"placement": "v"} if policy == "zero-bubble-v" else {}
    given = interleaved(
        (tight if limited else tight.model_copy(update={"in_flight_limit": None}),) * 4,
        policy=policy,
        **placement,
    )
    advice = compare_changes(given)
    offers = by_lever(advice.options, "offload")
    assert offers or any(text.startswith("offload") for text in advice.missing_options)
    for found in offers:
        assert found.host_bytes is not None and found.host_bytes > 0
        # Limits are of stages, so a rank may hold those of both its stages at once.
        assert max(found.in_flight) <= 2 and (found.activation_bytes or 0) <= 4 * GIB
    if limited:
        assert offers and offers[0].gain > 0


def write(tmp_path: Path, given: Problem) -> str:
    file = tmp_path / "problem.json"
    file.write_text(given.model_dump_json(exclude_none=True))
    return str(file)


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path, problem((stage(in_flight_limit=6, activation_bytes=GIB),) * 4))
    assert main(["advise", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["lever", "change", "iteration", "per", "sample", "bubble", "memory"]
    assert lines[2].split() == [
        "today", "as", "it", "is", "410.0", "ms", "12.2%", "1.00×", "6", "GiB",
    ]  # fmt: skip
    assert main(["advise", file, "--output", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["today"]["makespan"] == 410
    assert {option["lever"] for option in found["options"]} == {"microbatches", "offload"}
    assert set(found["options"][0]) == set(found["today"])
    assert found["measured_iteration_ms"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": [{"forward": 1, "backward_input": 1, "backward_weight": 1}]}, "layer_split is"),
        ({"layer_split": [1, 1]}, "layers is missing"),
        (
            {
                "layers": [{"forward": 1, "backward_input": 1, "backward_weight": 1, "count": 3}],
                "layer_split": [1, 1],
            },
            "layer_split is [1, 1], 2 layers; layers has 3",
        ),
        ({"policy": "gpipe", "ranks": 1}, "policy gpipe has one stage per rank"),
    ],
)
def test_bad_problems(change: dict[str, Any], words: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(json.loads(problem((stage(),) * 2).model_dump_json()) | change))
    assert main(["advise", str(file)]) == 2
    found = capsys.readouterr()
    assert words in found.err and found.err.count("\n") == 1 and found.out == ""


def report(**changes: Any) -> dict[str, Any]:
    base = {
        "emulated": True,
        "iterations": [{"index": i, "seconds": s} for i, s in enumerate([9.0, *[0.5] * 9])],
        "adaptations": [
            {
                "applied_at_iteration": 4,
                "routes": ["delegated"],
                "links": [{"link": 0, "delay": 0.01}, {"link": 0, "delay": 0.02}],
            },
            {"applied_at_iteration": None, "routes": ["direct"], "links": []},
        ],
        "spec": {
            "parallelism": {"stages": 2},
            "schedule": {"microbatches": 8, "inFlightLimit": 4},
            "trainer": {"module": "pipemorph_trainer.examples.emulated", "iterations": 10},
            "emulation": {
                "messageBytes": 1024,
                "stageTimes": [{"forward": 1, "backwardInput": 1, "backwardWeight": 1}],
            },
        },
    }
    return base | changes


def timeline() -> dict[str, Any]:
    durations = {"F": 3000, "B": 4000, "W": 2000}
    return {
        "traceEvents": [{"ph": "M", "name": "process_name"}]
        + [
            {"ph": "X", "cat": kind, "tid": stage, "ts": 0, "dur": took * (1 + stage) + noise}
            for stage in range(2)
            for kind, took in durations.items()
            for noise in (0, 0, 70_000)
        ]
    }


def test_the_layers_of_a_run_are_split_by_measured_times(tmp_path: Path, capsys: Any) -> None:
    """The fastest stage has only layers. What the other one has besides stays there."""
    content = report()
    content["spec"]["parallelism"]["layers"] = 8
    (tmp_path / "timeline.json").write_text(json.dumps(timeline()))
    for relayouts, split in (([], True), ([{"layers": [5, 3]}], False)):
        (tmp_path / "report.json").write_text(json.dumps(content | {"relayouts": relayouts}))
        assert main(["advise", str(tmp_path / "report.json"), "--output", "text"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        # F, B and W of a layer take 2.25 ms, those of the rest of stage 1 take 9 ms.
        assert ("layers 4-4 → 6-2" in out) is split
        text = "stage 1: 9 of 18 is no layer (such as a loss head or an embedding) and stays"
        assert (text in out) is split


def test_a_report_is_a_problem(tmp_path: Path, capsys: Any) -> None:
    """Op times from its timeline, delays and routes from its last plan in force."""
    from pipemorph.local.results.measured_problem import load_measured_problem

    file = tmp_path / "report.json"
    file.write_text(json.dumps(report()))
    found = load_measured_problem(str(file))
    assert found.source == "op times of the job's spec (EMULATED)"
    assert found.problem.stages[0].forward == 1
    (tmp_path / "timeline.json").write_text(json.dumps(timeline()))
    found = load_measured_problem(str(file))
    assert found.source == "op times measured in the run (EMULATED)"
    assert [s.forward for s in found.problem.stages] == [3, 6]
    assert [s.offload_copy for s in found.problem.stages] == [0, 0]
    assert [s.reduction for s in found.problem.stages] == [None, None]
    groups = [{"stage": 1, "exposed": seconds} for seconds in (0.004, 0.007)]
    file.write_text(json.dumps(report(reductions=groups)))
    found = load_measured_problem(str(file))
    assert [s.reduction for s in found.problem.stages] == [None, 7], "the slower group's"
    file.write_text(json.dumps(report(reductions=[{"stage": 1}])))
    with pytest.raises(InputError, match="is not a valid report"):
        load_measured_problem(str(file))
    file.write_text(json.dumps(report()))
    assert [s.backward_weight for s in found.problem.stages] == [2, 4]
    assert found.problem.list_in_flight_limits() == (4, 4)
    assert found.problem.links[0].delay == pytest.approx(20) and found.problem.links[0].queues == 8
    assert found.iteration_ms == 500
    assert main(["advise", str(file)]) == 0
    out = capsys.readouterr().out
    assert "measured today: 500.0 ms" in out and "EMULATED" in out


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("report.json", json.dumps(report()), True),
        ("report.json", json.dumps({"spec": {}}), False),
        ("report.json", json.dumps([1]), False),
        ("report.json", "{", False),
        ("report.yaml", json.dumps(report()), False),
        ("report", json.dumps(report()), False),
    ],
)
def test_a_report_is_known_by_its_name_and_its_fields(
    name: str, text: str, is_one: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert is_run_report(str(tmp_path / name)) is is_one


def test_a_report_of_several_stages_per_rank_names_the_stages_of_each_rank(
    tmp_path: Path, capsys: Any
) -> None:
    """Planned as if each stage had a rank of its own, a rank's idle time would be overstated."""
    from pipemorph.local.results.measured_problem import load_measured_problem

    given = report(adaptations=[])
    cut = {"stages": 4, "stagesPerRank": 2, "stagePlacement": "v"}
    given["spec"]["parallelism"] = cut
    del given["spec"]["schedule"]["inFlightLimit"]
    file = tmp_path / "report.json"
    file.write_text(json.dumps(given))
    found = load_measured_problem(str(file)).problem
    assert (found.stage_count, found.ranks, found.placement) == (4, 2, "v")
    ran = plan(found).simulation
    # Two ranks with two stages each of 3 ms, 8 microbatches.
    assert len(ran.schedule.ranks) == 2 and ran.makespan >= 48
    assert ran.bubble_fraction == pytest.approx(1 - 96 / (2 * ran.makespan))
    assert main(["advise", str(file), "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["today"]["makespan"] == ran.makespan


def applied(routes: Any = ("direct",), delay: float = 0.02) -> dict[str, Any]:
    links = [{"link": 0, "delay": delay}]
    return {"applied_at_iteration": 3, "routes": list(routes), "links": links}


def op(kind: str = "F", **changes: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "tid": 0, "ts": 0, "dur": 1000} | changes


@pytest.mark.parametrize(
    ("content", "trace", "words"),
    [
        (report(spec={"parallelism": {}}), None, "report.json: spec."),
        (report(spec=[]), None, "report.json: spec."),
        (
            report(spec={k: v for k, v in report()["spec"].items() if k != "emulation"}),
            None,
            "has no op times, and there is no timeline.json in its folder",
        ),
        (report(iterations=[{"index": 1}]), None, "report.json: is not a valid report"),
        (report(iterations=[{"seconds": float("nan")}]), None, "is not a valid report"),
        (report(iterations={}, adaptations=[3]), None, "is not a valid report"),
        (report(adaptations=[applied(routes=["direct"] * 5)]), None, "is not a valid report"),
        (report(adaptations=[applied(delay=1e400)]), None, "is not a valid report"),
        (report(), {"traceEvents": [{"ph": "X"}]}, "timeline.json: is not a valid timeline"),
        (report(), {"events": []}, "is not a valid timeline of a run"),
        (report(), [], "is not a valid timeline of a run"),
        (report(), {"traceEvents": [op(dur=-5), op("B")]}, "is not a valid timeline"),
        (report(), {"traceEvents": [op(dur=1e400), op("B")]}, "is not a valid timeline"),
        (report(), {"traceEvents": [op(tid="x")]}, "is not a valid timeline of a run"),
    ],
)
def test_bad_reports(
    content: dict[str, Any], trace: Any, words: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(content))
    if trace is not None:
        (tmp_path / "timeline.json").write_text(json.dumps(trace))
    assert main(["advise", str(file)]) == 2
    found = capsys.readouterr()
    assert words in found.err and found.err.count("\n") == 1 and found.out == ""
