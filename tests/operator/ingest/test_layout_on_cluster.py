"""Layers that move between the stages of a job in pods: decided, told, on trial, and gone back
from. No cluster."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from moving_job import FIRST, LOSS, MOVED, RESUMED, Ingest, an_api, layouts, stages_even, status
from operator_status import KEY, tell

from pipemorph.exits import PARTS_STAY
from pipemorph.ingest import PlannerLost
from pipemorph_operator.ingest.status.recovery_events import RecoveryEvents


async def test_a_stage_that_stays_slow_gets_fewer_layers_and_status_says_so() -> None:
    api = an_api()
    ingest = await Ingest(api).begin()
    await ingest.looks(1, 1, 1, 1, times=3)
    assert ingest.asked == FIRST
    await ingest.looks(1, 1.5, 1, 1, times=2)
    assert ingest.asked == FIRST, "it may be slow for a moment"
    await ingest.looks(1, 1.5, 1, 1, times=3)
    assert ingest.asked == MOVED
    query = {"attempt": "0", "generation": "0", "wait": "0"}
    told = (await ingest.desk.poll(*KEY, **query)).body
    assert b'"leave":true' in told and b'"leave_for":{"layers":[5,3,4,4]' in told
    told = await ingest.gone(left_for=MOVED, finished=ingest.done, reached=ingest.done)
    assert layouts(told) == (1, MOVED, FIRST)
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
    assert "by stage they hold 5, 3, 4, 4 layers on trial; layers move:" in stages_even(api)[1]
    (event,) = RecoveryEvents(None).changed(found.recoveries)
    assert (event.kind, event.reason) == ("Normal", "LayoutChanged")

    await tell(ingest.desk, 0, generation=1, launcher="of 0", **RESUMED)
    await ingest.looks(1.25, 1.125, 1, 1, times=2)
    await ingest.store.persist_generations(*KEY)
    told_last = stages_even(api)[1]
    assert "by stage they hold 5, 3, 4, 4 layers; with other layers from iteration" in told_last
    assert status(api).recoveries.layout_before is None  # type: ignore[union-attr]
    await ingest.looks(1.25, 1.125, 1, 1, seconds=0.75, times=12)
    await ingest.store.persist_generations(*KEY)
    brought = "with other layers an iteration takes 25% less time than before, "
    assert brought in stages_even(api)[1] and "% less promised" in stages_even(api)[1]
    (now,) = status(api).recoveries.last  # type: ignore[union-attr]
    assert (now.promised, now.measured) == (record.promised, 0.25)


async def test_wires_are_looked_at_only_for_a_question() -> None:
    """Of a large job they are many, and this is the loop that answers all jobs."""
    ingest = await Ingest(an_api()).begin()
    moving = ingest.store.moving(*KEY)
    assert moving is not None and moving.moves is not None
    moves, seen = moving.moves, []
    see = moves._see
    moves._see = lambda network: (seen.append(network), see(network))[1]  # type: ignore[method-assign]
    await ingest.looks(1, 1, 1, 1, times=3)
    await ingest.looks(1, 1.5, 1, 1, times=2)
    assert seen == []
    await ingest.looks(1, 1.5, 1, 1, times=3)
    assert ingest.asked == MOVED and len(seen) == 1


async def test_what_fails_on_trial_goes_back_and_is_not_tried_again() -> None:
    api = an_api()
    ingest = await Ingest(api).begin()
    await ingest.moves()
    told = await ingest.gone(1, loss=LOSS, finished=ingest.done)
    assert layouts(told) == (2, FIRST, None)
    assert ingest.controller.layers == ()
    assert ingest.forwards() == pytest.approx([0.01, 0.015, 0.01, 0.01])
    text = RecoveryEvents(None).changed(status(api).recoveries)[0].message
    assert text.endswith("they have the layout of before again")
    ingest.now += 10_000.0
    await ingest.looks(1, 1.7, 1, 1, times=6)
    assert ingest.asked != MOVED


@pytest.mark.parametrize("why", ["rank 1: no memory", f"{PARTS_STAY}no builder"])
async def test_ranks_that_do_not_leave_say_why(why: str) -> None:
    api = an_api()
    ingest = await Ingest(api).begin()
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=6)
    assert ingest.asked == MOVED
    await tell(ingest.desk, 0, event="stays", why=why, launcher="of 0")
    await ingest.looks(1, 1.5, 1, 1)
    await ingest.store.persist_generations(*KEY)
    assert stages_even(api)[1].endswith(f"layers stay where they are: {why}")
    await ingest.looks(1, 1.8, 1, 1, times=8)
    assert ingest.asked == FIRST, "not for a while"
    ingest.now += 10_000.0
    await ingest.looks(1, 2.5, 1, 1, times=8)
    assert (ingest.asked == FIRST) is why.startswith(PARTS_STAY)


async def test_a_search_that_is_lost_is_made_again() -> None:
    ingest = await Ingest(an_api()).begin()
    here, lost = ingest.layouts._search, [PlannerLost("killed")]

    async def search(key: Any, asked: Any) -> Any:
        if lost:
            raise lost.pop()
        return await here(key, asked)

    ingest.layouts._search = search
    await ingest.looks(1, 1, 1, 1)
    for _ in range(8):
        if not lost:
            break
        await ingest.looks(1, 1.5, 1, 1)
    assert not lost and ingest.asked == FIRST
    await ingest.looks(1, 1.5, 1, 1)
    assert ingest.asked == MOVED


async def test_what_was_found_for_ranks_that_have_ended_is_dropped() -> None:
    ingest = await Ingest(an_api()).begin()
    here = ingest.layouts._search

    async def search(key: Any, asked: Any) -> Any:
        found = await here(key, asked)
        await tell(ingest.desk, 0, event="failed", loss=LOSS, launcher="of 0")
        return found

    ingest.layouts._search = search
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=5)
    assert ingest.asked == FIRST
    told = await ingest.gone(0, loss=LOSS, finished=ingest.done)
    assert layouts(told)[:2] == (1, FIRST)
    assert ingest.controller.layers == ()


async def test_a_generation_that_begins_before_launchers_are_told_drops_the_request() -> None:
    ingest = await Ingest(an_api()).begin()
    ask, failed = ingest.desk.ask, []

    async def late(*args: Any, **kwargs: Any) -> bool:
        """Reports have the job's turn before, and the next one is looked at."""
        failed.append(await ingest.gone(0, loss=LOSS, finished=ingest.done))
        ingest.layouts.reported(*KEY)
        return await ask(*args, **kwargs)

    ingest.desk.ask = late  # type: ignore[method-assign]
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=6)
    assert failed[0]["generation"] == 1 and ingest.asked == FIRST
    moving = ingest.store.moving(*KEY)
    assert moving is not None and moving.moves is not None
    assert moving.moves.asked is None


async def test_layers_move_only_in_attempts_that_begin_with_that() -> None:
    """Pods go by the file that they began with, and would not pass it on."""
    api = an_api()
    del api.job["spec"]["adaptation"]
    ingest = await Ingest(api).begin()
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=8)
    assert ingest.asked == FIRST
    api.job["spec"]["adaptation"] = {"relayout": True}
    api.job["metadata"]["generation"] = 2
    ingest.store.changed(KEY, copy.deepcopy(api.job))
    await ingest.looks(1, 1, 1, 1)
    await ingest.looks(1, 1.5, 1, 1, times=6)
    assert ingest.asked == FIRST
    generations = ingest.store.generations(*KEY)
    assert generations is not None and not generations.layouts.move
    moving = ingest.store.moving(*KEY)
    assert moving is not None and moving.moves is not None and moving.moves.told == ""
    api.job["status"]["attempt"] = 1
    ingest.store.changed(KEY, copy.deepcopy(api.job))
    assert generations.layouts.move
