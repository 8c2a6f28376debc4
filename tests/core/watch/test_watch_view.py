"""Document of the page of a running job, and that the page needs no more."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from watched_jobs import (
    ACTIVATIONS,
    CHANGED_AT,
    LATE,
    NOW,
    RETURNED_AT,
    ROOM,
    SLOW_AT,
    WELL_AT,
    Case,
    link_states,
    situation_of,
    watched,
)

from pipemorph.control.decide.forecast import Forecast
from pipemorph.planning import Route
from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.protocol import Health, LinkState
from pipemorph.spec.job_status import JobStatus
from pipemorph.views.live_page.document_cache import render_live_page
from pipemorph.views.live_page.link_history import LinkHistory
from pipemorph.views.live_page.page_builder import (
    RowLimits,
    StageTrace,
    WatchedJob,
    build_page_document,
    build_picture,
    find_idle_times,
    find_slowest_column,
)
from pipemorph.views.live_page.page_document import PageDocument, PictureRow

F, B, W = OpKind.F, OpKind.B, OpKind.W


def view_of(*case: Any, **more: Any) -> PageDocument:
    known, traces = watched(*case, **more)
    return build_page_document(known, traces, column=0)


def spans(row: PictureRow) -> list[tuple[int, int]]:
    """Start and end of each op, microseconds."""
    found, at = [], 0
    for gap, duration in zip(row.gaps, row.durations, strict=True):
        found.append((at + gap, at + gap + duration))
        at += gap + duration
    return found


def test_the_cause_of_every_idle_time() -> None:
    ran = [
        [(0, TimedOp(F, 0, 0, 2)), (0, TimedOp(B, 0, 9, 11)), (0, TimedOp(W, 0, 12, 13))],
        [(1, TimedOp(F, 0, 3, 5)), (1, TimedOp(B, 0, 5, 7)), (1, TimedOp(W, 0, 7, 8))],
    ]
    assert find_idle_times(ran) == [
        # B of stage 1 was computed at 7 and was there at 9; W needs no input.
        [(IdleCause.DEPENDENCY, 2, 7), (IdleCause.LINK, 7, 9), (IdleCause.ORDER, 11, 12)],
        [(IdleCause.FILL, 0, 3), (IdleCause.DRAIN, 8, 13)],
    ]


def test_within_a_rank_no_message_is_on_a_link() -> None:
    ran = [[(0, TimedOp(F, 0, 0, 2)), (1, TimedOp(F, 0, 3, 5)), (1, TimedOp(B, 0, 5, 6))]]
    assert find_idle_times(ran) == [[(IdleCause.ORDER, 2, 3)]]


def test_a_picture_has_every_op_at_its_time() -> None:
    ran = [[(0, TimedOp(F, 0, 5.0, 5.002)), (0, TimedOp(B, 0, 5.003, 5.0045))],
           [(1, TimedOp(F, 0, 5.002, 5.003))]]  # fmt: skip
    room = RowLimits(in_flight_limits=(2, None))
    made = build_picture(ran, iteration=3, plan_version=0, seconds=None, room=room, numbers=(0, 1))
    first, second = made.rows
    assert (first.kinds, first.microbatches, spans(first)) == (
        "FB", [0, 0], [(0, 2000), (3000, 4500)]
    )  # fmt: skip
    assert spans(second) == [(2000, 3000)]
    assert made.span_us == 4500
    assert (first.in_flight, first.limit, second.limit) == (1, 2, None)
    assert (first.activations, second.activations) == (None, None), "of unknown size"
    assert made.bubble == pytest.approx((1 + 3.5) / 9)
    assert sum(made.causes.values()) == pytest.approx(made.bubble)


def test_rows_of_several_stages_are_named_by_their_rank() -> None:
    known, _ = watched(4, 12)
    spec = known.job.spec
    cut = spec.parallelism.model_validate({"stages": 4, "replicas": 2, "stagesPerRank": 2})
    job = known.job.model_copy(update={"spec": spec.model_copy(update={"parallelism": cut})})
    assert cut.mesh.columns == 2
    traces = [
        StageTrace(
            cut.mesh.find_rank(stage, 1), stage, 1, 59, 0, (TimedOp(F, 0, stage, stage + 1),)
        )
        for stage in range(4)
    ]
    view = build_page_document(replace(known, job=job), traces, column=1)
    assert view.measured is not None
    first, second = sorted({trace.rank for trace in traces})
    assert [row.name for row in view.measured.rows] == [
        f"rank {first} (0, 2)",
        f"rank {second} (1, 3)",
    ]
    assert (first, second) != (0, 1)


@pytest.mark.parametrize("stages", [4, 8])
def test_the_same_iteration_under_the_plan_of_the_start(stages: int) -> None:
    known, traces = watched(stages, 12)
    view = build_page_document(known, traces, column=0)
    assert known.outlook is not None and view.measured and view.alternative
    forecast = Forecast(known.outlook.planning_spec, known.outlook.situation)
    start, running = known.outlook.initial_plan, known.outlook.running_plan
    longer = forecast.predict_option(start).seconds - forecast.predict_option(running).seconds
    assert longer > 0
    # The model's errors cancel: what was measured, and what the other plan takes longer.
    assert view.measured.seconds == known.samples[-1].seconds
    assert view.alternative.seconds == pytest.approx(view.measured.seconds + longer)
    assert view.alternative.span_us == pytest.approx(
        1e6 * forecast.predict_option(start).seconds, abs=2
    )
    assert view.alternative.iteration == view.measured.iteration
    assert len(view.alternative.rows) == stages


def test_microbatches_in_flight_and_their_limits_are_of_each_plan() -> None:
    known, traces = watched(4, 12)
    start = replace(known.outlook.initial_plan, in_flight_limits=(12, 12, 11, 11))
    running = replace(known.outlook.running_plan, in_flight_limits=(12, 12, 12, None))
    known = replace(known, outlook=replace(known.outlook, initial_plan=start, running_plan=running))
    view = build_page_document(known, traces, column=0)
    assert view.measured and view.alternative
    assert [row.limit for row in view.measured.rows] == [12, 12, 12, None]
    assert [row.limit for row in view.alternative.rows] == [12, 12, 11, 11]
    peaks = running.schedule.count_in_flight_peaks()
    assert [row.in_flight for row in view.measured.rows] == list(peaks)
    older = [replace(trace, plan_version=3) for trace in traces]
    unknown = build_page_document(known, older, column=0).measured
    assert unknown is not None and {row.limit for row in unknown.rows} == {None}


def test_a_return_to_another_plan_is_compared_with_the_initial_one() -> None:
    known, traces = watched(4, 12, "recovered")
    view = build_page_document(known, traces, column=0)
    assert view.no_alternative == "the initial plan is in force in this iteration"
    last = known.changes[-1].model_copy(update={"warmup_after": [12, 10, 3, 1]})
    known = replace(known, changes=[known.changes[0], last])
    assert build_page_document(known, traces, column=0).alternative is not None


def test_rows_are_in_the_order_of_their_stages_whatever_places_ranks_have_changed_to() -> None:
    known, traces = watched(4, 12)
    running = replace(known.outlook.running_plan, in_flight_limits=(9, 10, 11, 12))
    known = replace(known, outlook=replace(known.outlook, running_plan=running))
    moved = [replace(trace, rank={1: 2, 2: 1}.get(trace.rank, trace.rank)) for trace in traces]
    view = build_page_document(known, moved, column=0)
    expected = [(row.name, row.limit) for row in view.measured.rows]
    assert expected == [("stage 0", 9), ("stage 1", 10), ("stage 2", 11), ("stage 3", 12)]


def test_activations_are_those_of_the_microbatches_on_the_device() -> None:
    known, traces = watched(4, 12)
    assert known.outlook is not None
    view = build_page_document(known, traces, column=0)
    assert view.measured and view.alternative and view.activation_memory == ROOM
    for row in (*view.measured.rows, *view.alternative.rows):
        assert row.activations == row.in_flight * ACTIVATIONS > 0

    def activations(**of_plan: Any) -> list[int | None]:
        outlook = replace(
            known.outlook, running_plan=replace(known.outlook.running_plan, **of_plan)
        )
        made = build_page_document(replace(known, outlook=outlook), traces, column=0).measured
        return [row.activations for row in made.rows]

    most = [row.in_flight for row in view.measured.rows]
    # A stage that offloads has the others in host memory.
    away = activations(device_limits=(2, None, None, None))
    assert away == [each * ACTIVATIONS for each in (2, *most[1:])]
    # A stage that recomputes holds inputs of the others, whose size is unknown.
    dropped = activations(device_limits=(2, None, None, None), recompute=(True, *(False,) * 3))
    assert dropped == [None] * 4
    older = [replace(trace, plan_version=3) for trace in traces]
    unknown = build_page_document(known, older, column=0).measured
    assert unknown is not None and {row.activations for row in unknown.rows} == {None}


def test_activations_of_a_rank_with_several_stages_are_summed() -> None:
    row = [(0, TimedOp(F, 0, 0, 1)), (2, TimedOp(F, 0, 1, 2)), (2, TimedOp(B, 0, 2, 3)),
           (2, TimedOp(W, 0, 3, 4)), (0, TimedOp(F, 1, 4, 5))]  # fmt: skip
    assert RowLimits(activation_sizes=(10, 99, 7)).compute_peak_bytes(0, row, 2) == 20
    assert RowLimits(activation_sizes=(10, 99, 70)).compute_peak_bytes(0, row, 2) == 80
    assert RowLimits(activation_sizes=(10, 99, None)).compute_peak_bytes(0, row, 2) is None
    assert RowLimits(activation_sizes=(10,)).compute_peak_bytes(0, row, 2) is None


@pytest.mark.parametrize(("gpus", "unit"), [(0, "rank"), (32, "GPU")], ids=["ranks", "gpus"])
def test_hours_are_of_gpus_where_the_job_has_some(gpus: int, unit: str) -> None:
    known, traces = watched(4, 12)
    view = build_page_document(replace(known, gpus=gpus), traces, column=0)
    assert (view.gpus, view.ranks) == (gpus, 4)
    assert any(f" {unit}-hours, against the initial plan" in line for _, line in view.explanation)


def test_the_plan_of_the_start_is_compared_for_all_replicas_whichever_is_drawn() -> None:
    """Replicas wait for the slowest one, so what a change saves is the same for each of them."""
    known, traces = watched(4, 12, replicas=3)
    assert find_slowest_column(known) == 1
    saved = {}
    for column in range(3):
        view = build_page_document(known, traces, column=column)
        assert view.measured is not None and view.measured.seconds is not None
        assert view.alternative is not None and view.alternative.seconds is not None
        saved[column] = view.alternative.seconds - view.measured.seconds
        # The drawing is that pipeline's own.
        assert bool(view.measured.causes.get("link", 0) > 0.05) is (column == 1), column
    forecast = Forecast(known.outlook.planning_spec, known.outlook.situation)
    longer = (
        forecast.predict_option(known.outlook.initial_plan).seconds
        - forecast.predict_option(known.outlook.running_plan).seconds
    )
    assert longer > 0.05
    assert saved == pytest.approx(dict.fromkeys(range(3), longer))


@pytest.mark.parametrize("case", ["healthy", "slow", "recovered"])
def test_no_alternative_where_the_plan_of_the_start_runs(case: Any) -> None:
    view = view_of(4, 12, case)
    assert view.alternative is None and "initial plan is in force" in view.no_alternative


def test_an_older_iteration_has_the_links_of_then() -> None:
    known, traces = watched(4, 12)
    older = known.available[-5]
    traces = [replace(trace, iteration=older) for trace in traces]
    # Since then the link has become much slower.
    log = known.link_history.copy()
    late = link_states(4, {1: 4 * LATE}, older + 1)
    log.record_states(older + 2, late, [Route.DIRECT, Route.DELEGATED, Route.DIRECT], {})
    known = replace(known, link_history=log)
    assert known.outlook is not None
    known = replace(known, outlook=replace(known.outlook, situation=situation_of(4, {1: 4 * LATE})))
    view = build_page_document(known, traces, column=0)
    then = Forecast(known.outlook.planning_spec, situation_of(4, {1: LATE})).predict_option(
        known.outlook.initial_plan
    )
    assert view.alternative.span_us == pytest.approx(1e6 * then.seconds, abs=2)


def test_an_older_iteration_has_the_direct_routes_that_were_broken_then() -> None:
    """The alternative had the link delegated too, whatever route the plan of the start has."""
    known, traces = watched(4, 12, delegated=False)
    older = known.available[-5]
    traces = [replace(trace, iteration=older) for trace in traces]
    log = LinkHistory()
    broke = [replace(each, failed_over=each.link == 1) for each in link_states(4, {1: LATE}, 12)]
    log.record_states(older - 1, broke, [Route.DIRECT] * 3, {})
    log.record_states(older + 1, link_states(4, {1: LATE}, 12), [Route.DIRECT] * 3, {})
    view = build_page_document(replace(known, link_history=log), traces, column=0)
    assert known.outlook is not None and view.alternative is not None
    # Delegated links have several queues and may be late in any order.
    situation = replace(situation_of(4, {1: LATE}), failed_over=(False, True, False))
    then = (
        Forecast(known.outlook.planning_spec, situation)
        .predict_option(known.outlook.initial_plan)
        .seconds
    )
    now = (
        Forecast(known.outlook.planning_spec, situation_of(4, {1: LATE}))
        .predict_option(known.outlook.initial_plan)
        .seconds
    )
    assert then != pytest.approx(now, rel=1e-3)
    assert view.alternative.span_us == pytest.approx(1e6 * then, abs=2)
    # In the newest iteration the link is on its direct route again.
    assert known.available[-1] > older + 1


def slow_times(log: LinkHistory) -> list[tuple[Any, ...]]:
    """Link, begin, end, delay and column of each."""
    return [tuple(each.model_dump().values()) for each in log.list_slow_periods()]


def test_lanes_show_the_state_of_each_link() -> None:
    log, direct = LinkHistory(), Route.DIRECT
    well = LinkState(0, Health.HEALTHY, wire_time=0.001)
    log.record_states(0, [LinkState(0, Health.UNKNOWN)], [direct], {})
    log.record_states(2, [well], [direct], {})
    slow = LinkState(0, Health.SLOW, delay=0.06, since_iteration=5)
    log.record_states(7, [slow], [direct], {})
    log.record_states(8, [replace(slow, delay=0.0605)], [direct], {})  # Looks the same.
    log.record_states(9, [slow], [Route.DELEGATED], {})
    log.record_states(20, [slow], [Route.DELEGATED], {0: "tcp"})
    log.record_states(30, [replace(slow, transfer=0.05)], [direct], {})
    (lane,) = log.build_timelines(["link 0"])
    assert [tuple(span.model_dump().values()) for span in lane.spans] == [
        (0, 2, "unknown", False, "unknown"),
        (2, 5, "healthy", False, "healthy"),
        (5, 9, "slow", False, "+60 ms"),
        (9, 20, "slow", True, "+60 ms, delegated"),
        (20, 30, "fallen", True, "fell back to tcp, +60 ms, delegated"),
        (30, None, "narrow", False, "+60 ms, narrow"),
    ]
    assert slow_times(log) == [(0, 5, None, 0.06, 0)]
    assert [each.health for each in log.get_states_at(4)] == [Health.HEALTHY]
    assert [each.delay for each in log.get_states_at(6)] == [0.06]


def test_a_slow_time_ends_when_it_ended_and_not_when_that_was_noticed() -> None:
    log, away = LinkHistory(), [Route.DELEGATED]
    slow = LinkState(0, Health.SLOW, delay=0.06, since_iteration=5)
    log.record_states(0, [LinkState(0, Health.HEALTHY)], away, {})
    for at, link in ((7, slow), (15, replace(slow, delay=0.02)), (16, replace(slow, delay=0.0))):
        log.record_states(at, [link], away, {})
    assert [(each.begin, each.end) for each in log.list_slow_periods()] == [(5, 16)], (
        "a pause, so far"
    )
    log.record_states(17, [LinkState(0, Health.HEALTHY, since_iteration=14)], away, {})
    assert [(each.begin, each.end) for each in log.list_slow_periods()] == [(5, 14)]


def test_a_lane_of_ranks_that_repeat_iterations() -> None:
    log, well = LinkHistory(), LinkState(0, Health.HEALTHY)
    slow = LinkState(0, Health.SLOW, delay=0.06, replica=2)
    for iteration, link in ((0, well), (30, slow), (40, well), (50, slow), (5, well), (9, slow)):
        log.record_states(iteration, [link], [Route.DIRECT], {})
    (lane,) = log.build_timelines(["link 0"])
    expected = [(span.begin, span.end, span.kind) for span in lane.spans]
    assert expected == [(0, 9, "healthy"), (9, None, "slow")]


def test_a_lane_of_ranks_that_repeat_iterations_in_the_same_state() -> None:
    log, well = LinkHistory(), LinkState(0, Health.HEALTHY)
    slow = LinkState(0, Health.SLOW, delay=0.06, replica=2)
    for iteration, link in ((0, well), (30, slow), (40, well), (50, slow), (5, slow)):
        log.record_states(iteration, [link], [Route.DIRECT], {})
    (lane,) = log.build_timelines(["link 0"])
    expected = [(span.begin, span.end, span.kind) for span in lane.spans]
    assert expected == [(0, 5, "healthy"), (5, None, "slow")]


def test_a_link_whose_direct_route_broke_is_delegated() -> None:
    log, well = LinkHistory(), LinkState(0, Health.HEALTHY)
    log.record_states(0, [well], [Route.DIRECT], {})
    log.record_states(5, [replace(well, failed_over=True)], [Route.DIRECT], {})
    (lane,) = log.build_timelines(["link 0"])
    (last,) = lane.spans[1:]
    assert (last.kind, last.delegated, last.begin) == ("healthy", True, 5)
    assert last.text == "healthy, fell back to the engine"


def test_a_link_is_slow_since_it_was_found_to_be_however_often_its_delay_changes() -> None:
    log = LinkHistory()
    for i in range(12, 3000):
        delay = 0.01 * (1 + i % 2)
        slow = LinkState(0, Health.SLOW, delay=delay, since_iteration=11)
        log.record_states(i, [slow], [Route.DIRECT], {})
    assert [each[1] for each in slow_times(log)] == [11]


def test_a_lane_is_bounded() -> None:
    log = LinkHistory()
    for i in range(3000):
        delay = 0.01 * (1 + i % 2)
        log.record_states(i, [LinkState(0, Health.SLOW, delay=delay)], [Route.DIRECT], {})
    (lane,) = log.build_timelines(["link 0"])
    assert len(lane.spans) == 200 and lane.spans[-1].begin == 2999


def story_of(case: Case, **more: Any) -> str:
    known, traces = watched(8, 24, case)
    story = build_page_document(replace(known, **more), traces, column=0).explanation
    return "\n".join(f"{label}: {line}" for label, line in story)


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("healthy", ["outcome: default/job-of-8 is Running;", "seen: no slow link", "to do: not"]),
        (
            "adapted",
            [
                f"seen: link 3 (stage 3 to 4) is late by up to 60 ms since iteration {SLOW_AT}\n",
                f"done: plan 1 from iteration {CHANGED_AT}: warm-up ",
                "link 3 delegated to the engine; ",
                " promised, ",
                "worth: the plan changes saved ",
            ],
        ),
        (
            "recovered",
            [
                "seen: link 3 (stage 3 to 4) was late by up to 60 ms, from iteration"
                f" {SLOW_AT} until {WELL_AT + 1}\n",
                f": plan 2 from iteration {RETURNED_AT}: back to the plan for healthy links",
            ],
        ),
        ("slow", ["done: nothing was changed"]),
        ("recovering", ["is Restarting (RanksEnded: rank 2 raised"]),
        ("failed", ["is Failed (RanksEnded: rank 2 raised", " until the end\n"]),
    ],
)
def test_the_story_is_the_explanation_of_the_job(case: Any, lines: list[str]) -> None:
    expected = story_of(case)
    for each in lines:
        assert each in expected


def test_slow_times() -> None:
    log, well = LinkHistory(), LinkState(0, Health.HEALTHY)
    slow = LinkState(0, Health.SLOW, delay=0.06, replica=2)
    for iteration, link in ((0, well), (3, slow), (5, replace(slow, delay=0.09)), (9, well)):
        log.record_states(iteration, [link], [Route.DIRECT], {})
    log.record_states(12, [LinkState(0, Health.UNKNOWN)], [Route.DIRECT], {})
    log.record_states(14, [slow], [Route.DIRECT], {})
    assert slow_times(log) == [(0, 3, 9, 0.09, 2), (0, 14, None, 0.06, 2)]
    # The line of an iteration says so, too: not while there is no delay to see.
    log.record_states(16, [replace(slow, delay=0.0001, in_doubt=True)], [Route.DIRECT], {})
    assert slow_times(log)[1:] == [(0, 14, 16, 0.06, 2)]
    log.record_states(19, [slow], [Route.DIRECT], {})
    assert slow_times(log)[1:] == [(0, 14, 16, 0.06, 2), (0, 19, None, 0.06, 2)]


def test_the_explanation_gives_the_reason_for_no_change() -> None:
    assert "done: the last decision changed nothing: it saves 0.3%" in story_of(
        "slow", keep_reason="it saves 0.3%"
    )
    assert "it saves 0.3%" not in story_of("recovered", keep_reason="it saves 0.3%")
    assert "done: nothing was changed while it was slow: it saves 0.3%" in story_of(
        "recovered", keep_reason="it saves 0.3%", changes=[]
    )


@pytest.mark.parametrize(
    ("wanted", "expected"), [(1, "plan 1 is not in force yet"), (2, "plan 1 was never in force")]
)
def test_a_change_is_to_come_only_while_the_ranks_are_to_change_to_it(
    wanted: int, expected: str
) -> None:
    known, _ = watched(8, 24)
    change = known.changes[0].model_copy(update={"applied_at_iteration": None})
    training = known.status.training.model_copy(update={"wanted_plan_version": wanted})
    status = known.status.model_copy(update={"training": training})
    assert expected in story_of("adapted", changes=[change], status=status)


def test_before_anything_is_known() -> None:
    known, _ = watched(4, 12)
    view = build_page_document(
        WatchedJob(known.job, NOW, JobStatus(state="Starting")), [], column=0
    )
    assert view.measured is None and view.alternative is None and "trace" in view.no_alternative
    assert (view.done, view.seconds, view.links, view.adaptations) == (0, None, [], [])
    assert render_live_page(view)


def test_it_shows_the_column_of_the_slowest_link() -> None:
    known, _ = watched(4, 12, replicas=5)
    assert find_slowest_column(known) == 2
    assert find_slowest_column(replace(known, status=JobStatus(state="Running"))) == 0


def test_the_document_has_a_schema_and_survives_its_json() -> None:
    view = view_of(8, 24)
    assert PageDocument.model_validate_json(view.model_dump_json()) == view
    schema = PageDocument.model_json_schema()
    assert schema["properties"]["version"]["const"] == 1
    assert set(schema["required"]) <= set(json.loads(view.model_dump_json()))


def test_the_largest_page_stays_small() -> None:
    assert len(render_live_page(view_of(64, 256))) < 2_500_000


def test_it_loads_nothing_and_no_text_becomes_markup() -> None:
    known, traces = watched(4, 12, "failed")
    known = replace(known, result_location="</script><i>x<!--")
    page = render_live_page(build_page_document(known, traces, column=0, live=False))
    assert page.count("</script>") == 2
    assert "<i>x" not in page and "<!--" not in page
    text = page.split('type="application/json">')[1].split("</script>", maxsplit=1)[0]
    assert json.loads(text)["view"]["result"] == "</script><i>x<!--"
    for reference in ("src=", "href=", "@import", "url(", "innerHTML"):
        assert reference not in page, reference
    assert page.count("http") == page.count("http://www.w3.org/2000/svg") == 1
    assert page.count("fetch(") == page.count('fetch("view"') == 1
