"""Layers that move between stages of jobs in pods: decision, request, trial, return. No cluster."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from moving_job import FIRST, LOSS, MOVED, RESUMED, Ingest, an_api, layouts, stages_even, status
from operator_status import KEY, tell

from pipemorph.exits import LAYERS_FIXED_PREFIX
from pipemorph.ingest import PlannerLostError
from pipemorph_operator.ingest.status.recovery_events import RecoveryEventFilter


async def test_a_stage_that_stays_slow_gets_fewer_layers_and_status_says_so() -> None:
    api = an_api()
    ingest = await Ingest(api).begin()
    await ingest.looks(1, 1, 1, 1, times=3)
    assert ingest.requested_layout == FIRST
    await ingest.looks(1, 1.5, 1, 1, times=2)
    assert ingest.requested_layout == FIRST, "it may be slow for a moment"
    await ingest.looks(1, 1.5, 1, 1, times=3)
    assert ingest.requested_layout == MOVED
    query = {"attempt": "0", "generation": "0", "wait": "0"}
    body = (await ingest.desk.handle_poll(*KEY, **query)).body
    assert b'"leave":true' in body and b'"leave_for":{"layers":[5,3,4,4]' in body
    answer = await ingest.gone(left_for=MOVED, finished=ingest.done, reached=ingest.done)
    assert layouts(answer) == (1, MOVED, FIRST)
    assert ingest.controller.layers == MOVED.layers
    assert ingest.forwards() == [0.0125, 0.01125, 0.01, 0.01]
    found = status(api)
    assert found.recoveries is not None and found.recoveries.count == 0
    (record,) = found.recoveries.last
    assert record.layers == [*MOVED.layers] and record.cause.startswith(
        "layers move between stages"
    )
    assert record.promised is not None and 0.1 < record.promised < 0.3
    assert record.measured is None
    assert "layers per stage are 5, 3, 4, 4 on trial; layers move:" in stages_even(api)[1]
    (event,) = RecoveryEventFilter(None).select_events(found.recoveries)
    assert (event.kind, event.reason) == ("Normal", "LayoutChanged")

    await tell(ingest.desk, 0, generation=1, launcher="of 0", **RESUMED)
    await ingest.looks(1.25, 1.125, 1, 1, times=2)
    await ingest.store.persist_generations(*KEY)
    last_message = stages_even(api)[1]
    assert "layers per stage are 5, 3, 4, 4; with other layers from iteration" in last_message
    assert status(api).recoveries.layout_before is None  # type: ignore[union-attr]
    await ingest.looks(1.25, 1.125, 1, 1, seconds=0.75, times=12)
    await ingest.store.persist_generations(*KEY)
    brought = "with other layers an iteration takes 25% less time than before, "
    assert brought in stages_even(api)[1] and "% less promised" in stages_even(api)[1]
    (now,) = status(api).recoveries.last  # type: ignore[union-attr]
    assert (now.promised, now.measured) == (record.promised, 0.25)


async def test_wires_are_looked_at_only_for_a_question() -> None:
    """Wires of a large job are many, and this is the loop that answers all jobs."""
    ingest = await Ingest(an_api()).begin()
    moving = ingest.store.find_tracked_job(*KEY)
    assert moving is not None and moving.moves is not None
    moves, seen = moving.moves, []
    see = moves._update_wire_delays
    moves._update_wire_delays = lambda network: (seen.append(network), see(network))[1]  # type: ignore[method-assign]
    await ingest.looks(1, 1, 1, 1, times=3)
    await ingest.looks(1, 1.5, 1, 1, times=2)
    assert seen == []
    await ingest.looks(1, 1.5, 1, 1, times=3)
    assert ingest.requested_layout == MOVED and len(seen) == 1


async def test_what_fails_on_trial_goes_back_and_is_not_tried_again() -> None:
    api = an_api()
    ingest = await Ingest(api).begin()
    await ingest.moves()
    answer = await ingest.gone(1, loss=LOSS, finished=ingest.done)
    assert layouts(answer) == (2, FIRST, None)
    assert ingest.controller.layers == ()
    assert ingest.forwards() == pytest.approx([0.01, 0.015, 0.01, 0.01])
    text = RecoveryEventFilter(None).select_events(status(api).recoveries)[0].message
    assert text.endswith("the previous layout is restored")
    ingest.now += 10_000.0
    await ingest.looks(1, 1.7, 1, 1, times=6)
    assert ingest.requested_layout != MOVED


@pytest.mark.parametrize("why", ["rank 1: no memory", f"{LAYERS_FIXED_PREFIX}no builder"])
async def test_ranks_that_do_not_leave_say_why(why: str) -> None:
    api = an_api()
    ingest = await Ingest(api).begin()
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=6)
    assert ingest.requested_layout == MOVED
    await tell(ingest.desk, 0, event="stays", why=why, launcher="of 0")
    await ingest.looks(1, 1.5, 1, 1)
    await ingest.store.persist_generations(*KEY)
    assert stages_even(api)[1].endswith(f"layers stay where they are: {why}")
    await ingest.looks(1, 1.8, 1, 1, times=8)
    assert ingest.requested_layout == FIRST, "not for a while"
    ingest.now += 10_000.0
    await ingest.looks(1, 2.5, 1, 1, times=8)
    assert (ingest.requested_layout == FIRST) is why.startswith(LAYERS_FIXED_PREFIX)


async def test_a_search_that_is_lost_is_made_again() -> None:
    ingest = await Ingest(an_api()).begin()
    here, lost = ingest.layouts._search, [PlannerLostError("killed")]

    async def search(key: Any, request: Any) -> Any:
        if lost:
            raise lost.pop()
        return await here(key, request)

    ingest.layouts._search = search
    await ingest.looks(1, 1, 1, 1)
    for _ in range(8):
        if not lost:
            break
        await ingest.looks(1, 1.5, 1, 1)
    assert not lost and ingest.requested_layout == FIRST
    await ingest.looks(1, 1.5, 1, 1)
    assert ingest.requested_layout == MOVED


async def test_what_was_found_for_ranks_that_have_ended_is_dropped() -> None:
    ingest = await Ingest(an_api()).begin()
    here = ingest.layouts._search

    async def search(key: Any, request: Any) -> Any:
        found = await here(key, request)
        await tell(ingest.desk, 0, event="failed", loss=LOSS, launcher="of 0")
        return found

    ingest.layouts._search = search
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=5)
    assert ingest.requested_layout == FIRST
    answer = await ingest.gone(0, loss=LOSS, finished=ingest.done)
    assert layouts(answer)[:2] == (1, FIRST)
    assert ingest.controller.layers == ()


async def test_a_generation_that_begins_before_launchers_know_drops_the_request() -> None:
    ingest = await Ingest(an_api()).begin()
    ask, failed = ingest.desk.request_layout, []

    async def late(*args: Any, **kwargs: Any) -> bool:
        """Reports have the job's turn before, and the next one is looked at."""
        failed.append(await ingest.gone(0, loss=LOSS, finished=ingest.done))
        ingest.layouts.process_report(*KEY)
        return await ask(*args, **kwargs)

    ingest.desk.request_layout = late  # type: ignore[method-assign]
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=6)
    assert failed[0]["generation"] == 1 and ingest.requested_layout == FIRST
    moving = ingest.store.find_tracked_job(*KEY)
    assert moving is not None and moving.moves is not None
    assert moving.moves.requested_change is None


async def test_layers_move_only_in_attempts_that_begin_with_that() -> None:
    """Pods go by the file that they began with, and would not pass it on."""
    api = an_api()
    del api.job["spec"]["adaptation"]
    ingest = await Ingest(api).begin()
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=8)
    assert ingest.requested_layout == FIRST
    api.job["spec"]["adaptation"] = {"relayout": True}
    api.job["metadata"]["generation"] = 2
    ingest.store.process_change(KEY, copy.deepcopy(api.job))
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=6)
    assert ingest.requested_layout == FIRST
    generations = ingest.store.find_generations(*KEY)
    assert generations is not None and not generations.layout_transition.may_change
    moving = ingest.store.find_tracked_job(*KEY)
    assert moving is not None and moving.moves is not None and moving.moves.last_note == ""
    api.job["status"]["attempt"] = 1
    ingest.store.process_change(KEY, copy.deepcopy(api.job))
    assert generations.layout_transition.may_change
