"""Layers that move between the stages of a job in pods: decided, told, on trial, and gone back
from. No cluster."""

from __future__ import annotations

import asyncio
import copy
from itertools import permutations
from typing import Any

import pytest
from operator_status import KEY, Shared, hear, known, tell

from pipemorph.api.status import JobStatus, condition
from pipemorph.control import JobController
from pipemorph.exits import PARTS_STAY
from pipemorph.ingest import GenerationDesk, PlannerLost, generations
from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused
from pipemorph_operator.ingest.moving import LayerMoves
from pipemorph_operator.ingest.status.recovery_events import RecoveryEvents
from pipemorph_operator.ingest.store import ClusterStore

EVEN, MOVED = (4, 4, 4, 4), (5, 3, 4, 4)
LOSS = {"reason": "rank 1 exited with code 1", "at": 1.0, "rank": 1}
RESUMED = {"event": "resumed", "resumed": {"iteration": 0, "rung": "kept"}}
START = 2.0
"""Seconds that ranks took to start, by the job's clock."""
OPS = {"fused_backward": None, "activation_bytes": None, "offload_copy": None, "peak_memory": 0}


def an_api(**parallelism: Any) -> Shared:
    """Of a job with four pods, each with a stage of four layers."""
    api = Shared()
    spec = api.job["spec"]
    spec["parallelism"] = {"stages": 4, "replicas": 1, "layers": 16, **parallelism}
    spec["schedule"] = {"microbatches": 12}
    spec["trainer"]["iterations"] = 5000
    spec["failurePolicy"] = {"maxRestarts": 5}
    spec["adaptation"] = {"relayout": True}
    return api


class Ingest:
    """One that serves the job, by the second and iteration."""

    def __init__(self, api: Shared, done: int = 0) -> None:
        self.api, self.now, self.done = api, 1000.0, done
        self.store = ClusterStore(api, monotonic=lambda: self.now)  # type: ignore[arg-type]
        self.desk = GenerationDesk(self.store)
        self.layers = LayerMoves(self.store, self.desk)

    async def begin(self) -> None:
        await known(self.store, self.api.job)
        for pod in range(4):
            await tell(self.desk, pod, event="joined", launcher=f"of {pod}")
        generations = self.store.generations(*KEY)
        assert generations is not None
        generations.progress.longest_start = START

    async def looks(self, *factors: float, times: int = 1, seconds: float = 1.0) -> None:
        """So many reports, a second apart, of two iterations each, which take ``seconds``; a
        microbatch takes so many times as long as usual on each stage."""
        for _ in range(times):
            self.now += 1.0
            op = [0.01 * factor for factor in factors]
            names = ("forward", "backward_input", "backward_weight")
            stages = [dict.fromkeys(names, took) | OPS | {"stage": i} for i, took in enumerate(op)]
            hear(self.store, self.done, self.done + 1, stages=stages, seconds=seconds)
            self.done += 2
            self.layers.reported(*KEY)
            await asyncio.gather(*self.layers.under_way)

    async def gone(self, generation: int = 0, **fields: Any) -> dict[str, Any]:
        """All pods say that their ranks are gone."""
        for pod in range(4):
            told = await tell(self.desk, pod, generation=generation, launcher=f"of {pod}", **fields)
        return told

    async def moves(self) -> None:
        """Layers move, and are on trial."""
        await self.looks(1, 1, 1, 1)
        await self.looks(1, 1.5, 1, 1, times=6)
        await self.gone(left_for=MOVED, finished=self.done, reached=self.done)
        assert self.controller.layers == MOVED

    @property
    def controller(self) -> JobController:
        found = self.store.lookup(*KEY)
        assert isinstance(found, JobController)
        return found

    @property
    def asked(self) -> tuple[int, ...]:
        generations = self.store.generations(*KEY)
        assert generations is not None
        return generations.splits.asked

    def forwards(self) -> list[float]:
        network = self.controller._observed.stages.times()
        assert network is not None
        return [round(each.forward, 6) for each in network]


def status(api: Shared) -> JobStatus:
    return JobStatus.model_validate(api.job["status"])


def stages_even(api: Shared) -> tuple[str, str]:
    found = condition(status(api), names.STAGES_EVEN)
    assert found is not None
    return found.reason, found.message


def test_a_stage_that_stays_slow_gets_fewer_layers_and_status_says_so() -> None:
    api = an_api()

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        await ingest.looks(1, 1, 1, 1, times=3)
        assert ingest.asked == ()
        await ingest.looks(1, 1.5, 1, 1, times=2)
        assert ingest.asked == (), "it may be slow for a moment"
        await ingest.looks(1, 1.5, 1, 1, times=3)
        assert ingest.asked == MOVED
        query = {"attempt": "0", "generation": "0", "wait": "0"}
        told = (await ingest.desk.poll(*KEY, **query)).body
        assert b'"leave":true' in told and b'"leave_layers":[5,3,4,4]' in told
        told = await ingest.gone(left_for=MOVED, finished=ingest.done, reached=ingest.done)
        assert (told["generation"], told["layers"], told["layers_before"]) == (1, [*MOVED], [])
        assert ingest.controller.layers == MOVED
        assert ingest.forwards() == [0.0125, 0.01125, 0.01, 0.01]
        found = status(api)
        assert found.recoveries is not None and found.recoveries.count == 0
        (record,) = found.recoveries.last
        assert record.layers == [*MOVED] and record.cause.startswith("layers move between stages")
        assert record.promised is not None and 0.1 < record.promised < 0.3
        assert record.measured is None
        assert "by stage they hold 5, 3, 4, 4 layers on trial; layers move:" in stages_even(api)[1]
        (event,) = RecoveryEvents(None).changed(found.recoveries)
        assert (event.kind, event.reason) == ("Normal", "LayersMoved")

        await tell(ingest.desk, 0, generation=1, launcher="of 0", **RESUMED)
        await ingest.looks(1.25, 1.125, 1, 1, times=2)
        await ingest.store.persist_generations(*KEY)
        told_last = stages_even(api)[1]
        assert "by stage they hold 5, 3, 4, 4 layers; with other layers from iteration" in told_last
        assert status(api).recoveries.layers_before is None  # type: ignore[union-attr]
        await ingest.looks(1.25, 1.125, 1, 1, seconds=0.75, times=12)
        await ingest.store.persist_generations(*KEY)
        brought = "with other layers an iteration takes 25% less time than before, "
        assert brought in stages_even(api)[1] and "% promised" in stages_even(api)[1]
        (now,) = status(api).recoveries.last  # type: ignore[union-attr]
        assert (now.promised, now.measured) == (record.promised, 0.25)

    asyncio.run(work())


def test_wires_are_looked_at_only_for_a_question() -> None:
    """Of a large job they are many, and this is the loop that answers all jobs."""
    api = an_api()

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        moving = ingest.store.moving(*KEY)
        assert moving is not None and moving.moves is not None
        moves, seen = moving.moves.moves, []
        see = moves.see
        moves.see = lambda network: (seen.append(network), see(network))[1]  # type: ignore[method-assign]
        await ingest.looks(1, 1, 1, 1, times=3)
        await ingest.looks(1, 1.5, 1, 1, times=2)
        assert seen == []
        await ingest.looks(1, 1.5, 1, 1, times=3)
        assert ingest.asked == MOVED and len(seen) == 1

    asyncio.run(work())


class Pods:
    """The launchers of the job's pods, which have had their ranks leave for other layers. Whatever
    they begin must be the same everywhere."""

    def __init__(self, ingest: Ingest) -> None:
        self.known = dict.fromkeys(range(4), 0)
        """By pod, the generation that it has begun."""
        self.began: dict[int, tuple[Any, Any]] = {}
        """The layers of each, and those before."""
        self._left = {"left_for": MOVED, "finished": ingest.done, "reached": ingest.done}

    async def tell(self, desk: GenerationDesk, pod: int) -> None:
        """One that has no ranks asks what to begin."""
        if self.known[pod] > 0:
            return
        told = await tell(desk, pod, launcher=f"of {pod}", **self._left)
        if told["generation"] > 0 and not told["over"]:
            self.known[pod] = told["generation"]
            what = tuple(told["layers"]), told["layers_before"]
            assert self.began.setdefault(told["generation"], what) == what


@pytest.mark.parametrize(
    "dies", ["before the write", "refused", "after the write", "after telling 1", "telling 3"]
)
@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_an_ingest_that_dies_between_writing_and_telling_of_layers_costs_nothing(
    dies: str, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever pods it has told, and in whatever order they ask the next one: all begin the same
    generation with the same layers, and no failure is counted."""
    monkeypatch.setattr(generations, "PERSIST_SECONDS", 0.005)
    api = an_api()

    async def work() -> None:
        first = Ingest(api)
        await first.begin()
        await first.looks(1, 1, 1, 1)
        await first.looks(1, 1.5, 1, 1, times=6)
        assert first.asked == MOVED
        pods, apply = Pods(first), api.apply

        async def stuck(*args: Any, **kwargs: Any) -> Any:
            if dies == "refused":
                raise ApiRefused(503, "ServiceUnavailable", "try again")
            if dies == "after the write":
                await apply(*args, **kwargs)
            await asyncio.Event().wait()

        if "telling" not in dies:
            api.apply = stuck  # type: ignore[method-assign]
        again = int(dies[-1]) if "telling" in dies else 4
        for pod in (*order, *order[:again]):
            await pods.tell(first.desk, pod)
        generation = first.store.generations(*KEY)
        assert generation is not None and generation.layers == MOVED
        assert (set(pods.known.values()) == {0}) is ("telling" not in dies)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        api.apply = apply  # type: ignore[method-assign]

        second = Ingest(api, first.done)
        await known(second.store, api.job)
        for pod in (*order, *order):
            await pods.tell(second.desk, pod)
        assert set(pods.known.values()) == {1} and pods.began == {1: (MOVED, [])}
        found = status(api).recoveries
        assert found is not None and (found.count, found.counted) == (0, 0)
        assert (found.generation, found.layers, found.layers_before) == (1, [*MOVED], [])

    asyncio.run(work())


def test_what_fails_on_trial_goes_back_and_is_not_tried_again() -> None:
    api = an_api()

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        await ingest.moves()
        told = await ingest.gone(1, loss=LOSS, finished=ingest.done)
        assert (told["generation"], told["layers"], told["layers_before"]) == (2, [], None)
        assert ingest.controller.layers == ()
        assert ingest.forwards() == pytest.approx([0.01, 0.015, 0.01, 0.01])
        text = RecoveryEvents(None).changed(status(api).recoveries)[0].message
        assert text.endswith("by stage they hold 4, 4, 4, 4 layers again")
        ingest.now += 10_000.0
        await ingest.looks(1, 1.7, 1, 1, times=6)
        assert ingest.asked != MOVED

    asyncio.run(work())


@pytest.mark.parametrize("refused", [True, False])
def test_an_ingest_that_takes_over_does_not_try_again_what_was_refused(refused: bool) -> None:
    """The ingest is killed after the ranks have gone back, the next one finds the same stage slow
    again. Without the refused split in status it would have ranks leave for it."""
    api = an_api()

    async def work() -> None:
        first = Ingest(api)
        await first.begin()
        await first.moves()
        await first.gone(1, loss=LOSS, finished=first.done)
        found = status(api).recoveries
        assert found is not None and found.layers_refused == [[*MOVED]]
        if not refused:
            api.job["status"]["recoveries"]["layersRefused"] = []
        second = Ingest(api, first.done)
        second.now += 10_000.0
        await known(second.store, api.job)
        await second.looks(1, 1, 1, 1, times=3)
        await second.looks(1, 1.5, 1, 1, times=6)
        assert (second.asked == MOVED) is not refused
        assert not refused or second.store.generations(*KEY).splits.refused == {MOVED}  # type: ignore[union-attr]

    asyncio.run(work())


def test_an_ingest_that_takes_over_expects_the_new_parts_and_decides_on() -> None:
    api = an_api()

    async def work() -> None:
        first = Ingest(api)
        await first.begin()
        await first.moves()
        assert api.plan is not None, "what stages do beside their layers is saved"
        await tell(first.desk, 0, generation=1, launcher="of 0", **RESUMED)
        await first.looks(1.25, 1.125, 1, 1, times=2)
        await first.store.persist_generations(*KEY)
        other = Ingest(api, first.done)
        await known(other.store, api.job)
        assert other.controller.layers == MOVED
        # The device is well again.
        await other.looks(1.25, 0.75, 1, 1, times=6)
        assert other.asked == EVEN
        told = await other.gone(1, left_for=EVEN, finished=other.done, reached=other.done)
        assert (told["generation"], told["layers"], told["layers_before"]) == (2, [], [*MOVED])
        assert other.controller.layers == ()

    asyncio.run(work())


def test_an_ingest_that_takes_over_on_trial_goes_back() -> None:
    api = an_api()

    async def work() -> None:
        first = Ingest(api)
        await first.begin()
        await first.moves()
        other = Ingest(api, first.done)
        await known(other.store, api.job)
        assert other.controller.layers == MOVED
        told = await other.gone(1, loss=LOSS, finished=other.done)
        assert (told["generation"], told["layers"], told["layers_before"]) == (2, [], None)
        assert other.controller.layers == ()
        await other.looks(1, 1.5, 1, 1, times=6)
        moving = other.store.moving(*KEY)
        assert moving is not None and moving.moves is not None
        # Nothing is proposed that generations would refuse.
        assert other.asked != MOVED and "lack a pod" not in moving.moves.told

    asyncio.run(work())


def test_who_does_not_know_what_stages_do_beside_their_layers_moves_none() -> None:
    api = an_api()

    async def work() -> None:
        first = Ingest(api)
        await first.begin()
        await first.moves()
        await tell(first.desk, 0, generation=1, launcher="of 0", **RESUMED)
        await first.store.persist_generations(*KEY)
        api.plan = None
        other = Ingest(api, first.done)
        await known(other.store, api.job)
        assert other.controller.layers == MOVED
        await other.looks(1.25, 0.75, 1, 1, times=8)
        assert other.asked == ()

    asyncio.run(work())


def test_a_new_attempt_begins_with_equally_many_layers() -> None:
    api = an_api()

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        await ingest.moves()
        api.job["status"]["attempt"] = 1
        ingest.store.changed(KEY, copy.deepcopy(api.job))
        assert (ingest.controller.attempt, ingest.controller.layers) == (1, ())

    asyncio.run(work())


@pytest.mark.parametrize("why", ["rank 1: no memory", f"{PARTS_STAY}no builder"])
def test_ranks_that_do_not_leave_say_why(why: str) -> None:
    api = an_api()

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        await ingest.looks(1, 1, 1, 1)
        await ingest.looks(1, 1.5, 1, 1, times=6)
        assert ingest.asked == MOVED
        await tell(ingest.desk, 0, event="stays", why=why, launcher="of 0")
        await ingest.looks(1, 1.5, 1, 1)
        await ingest.store.persist_generations(*KEY)
        assert stages_even(api)[1].endswith(f"layers stay where they are: {why}")
        await ingest.looks(1, 1.8, 1, 1, times=8)
        assert ingest.asked == (), "not for a while"
        ingest.now += 10_000.0
        await ingest.looks(1, 2.5, 1, 1, times=8)
        assert (ingest.asked == ()) is why.startswith(PARTS_STAY)

    asyncio.run(work())


def test_a_search_that_is_lost_is_made_again() -> None:
    api = an_api()

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        here, lost = ingest.layers._search, [PlannerLost("killed")]

        async def search(key: Any, asked: Any) -> Any:
            if lost:
                raise lost.pop()
            return await here(key, asked)

        ingest.layers._search = search
        await ingest.looks(1, 1, 1, 1)
        for _ in range(8):
            if not lost:
                break
            await ingest.looks(1, 1.5, 1, 1)
        assert not lost and ingest.asked == ()
        await ingest.looks(1, 1.5, 1, 1)
        assert ingest.asked == MOVED

    asyncio.run(work())


def test_what_was_found_for_ranks_that_have_ended_is_dropped() -> None:
    api = an_api()

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        here = ingest.layers._search

        async def search(key: Any, asked: Any) -> Any:
            found = await here(key, asked)
            await tell(ingest.desk, 0, event="failed", loss=LOSS, launcher="of 0")
            return found

        ingest.layers._search = search
        await ingest.looks(1, 1, 1, 1)
        await ingest.looks(1, 1.5, 1, 1, times=5)
        assert ingest.asked == ()
        told = await ingest.gone(0, loss=LOSS, finished=ingest.done)
        assert (told["generation"], told["layers"]) == (1, [])
        assert ingest.controller.layers == ()

    asyncio.run(work())


def test_a_generation_that_begins_before_launchers_are_told_drops_the_request() -> None:
    api = an_api()

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        ask, failed = ingest.desk.ask, []

        async def late(*args: Any, **kwargs: Any) -> bool:
            """Reports have the job's turn before, and the next one is looked at."""
            failed.append(await ingest.gone(0, loss=LOSS, finished=ingest.done))
            ingest.layers.reported(*KEY)
            return await ask(*args, **kwargs)

        ingest.desk.ask = late  # type: ignore[method-assign]
        await ingest.looks(1, 1, 1, 1)
        await ingest.looks(1, 1.5, 1, 1, times=6)
        assert failed[0]["generation"] == 1 and ingest.asked == ()
        moving = ingest.store.moving(*KEY)
        assert moving is not None and moving.moves is not None
        assert not moving.moves.asking and moving.moves.moves.asked is None

    asyncio.run(work())


def test_layers_move_only_in_attempts_that_begin_with_that() -> None:
    """Pods go by the file that they began with, and would not pass it on."""
    api = an_api()
    del api.job["spec"]["adaptation"]

    async def work() -> None:
        ingest = Ingest(api)
        await ingest.begin()
        await ingest.looks(1, 1, 1, 1)
        await ingest.looks(1, 1.5, 1, 1, times=8)
        assert ingest.asked == ()
        api.job["spec"]["adaptation"] = {"relayout": True}
        api.job["metadata"]["generation"] = 2
        ingest.store.changed(KEY, copy.deepcopy(api.job))
        await ingest.looks(1, 1, 1, 1)
        await ingest.looks(1, 1.5, 1, 1, times=6)
        assert ingest.asked == ()
        generations = ingest.store.generations(*KEY)
        assert generations is not None and not generations.splits.move
        moving = ingest.store.moving(*KEY)
        assert moving is not None and moving.moves is not None and moving.moves.told == ""
        api.job["status"]["attempt"] = 1
        ingest.store.changed(KEY, copy.deepcopy(api.job))
        assert generations.splits.move

    asyncio.run(work())
