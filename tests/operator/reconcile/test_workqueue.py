"""Turns: each job once, never twice at a time, failures later, none held up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from pipemorph_operator import __main__ as operator
from pipemorph_operator.kube.client import KubeApiError
from pipemorph_operator.metrics import RECONCILES
from pipemorph_operator.reconcile.node_accusations import NodeAccusations
from pipemorph_operator.reconcile.workqueue import WorkQueue

Key = tuple[str, str]


class QuickLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        look = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            self.now += timeout or 0.0
            return look(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def run_quickly(scenario: Callable[[WorkQueue[str]], Awaitable[None]], gap: float = 0.0) -> None:
    """Run a scenario of at most an hour in no time."""

    async def main() -> None:
        async with asyncio.timeout(3600):
            await scenario(WorkQueue(gap=gap))

    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        runner.run(main())


async def nothing_ready(queue: WorkQueue[str]) -> bool:
    try:
        async with asyncio.timeout(0.02):
            await queue.get()
    except TimeoutError:
        return True
    return False


async def test_a_job_enqueued_often_is_worked_on_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(100):
        queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert await nothing_ready(queue)


async def test_a_job_enqueued_during_its_turn_gets_another_turn_after_it() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    await queue.get()
    queue.add("a")
    assert await nothing_ready(queue), "two turns at a time"
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert await nothing_ready(queue), "it was enqueued once"


async def test_a_failure_comes_back_and_holds_up_no_other_job() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("bad")
    queue.add("good")
    assert await queue.get() == "bad"
    queue.done("bad", failed=True)
    assert await queue.get() == "good"
    queue.done("good")
    assert await queue.get() == "bad"


async def test_the_earlier_of_two_times_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 60.0)
    queue.add_after("a", 0.01)
    queue.add_after("a", 60.0)
    assert await queue.get() == "a"
    queue.done("a")
    assert await nothing_ready(queue)


async def test_turns_of_one_job_keep_a_gap_and_none_is_lost() -> None:
    queue: WorkQueue[str] = WorkQueue(gap=0.05)
    clock = asyncio.get_running_loop().time
    times = []
    queue.add("a")
    for _ in range(4):
        assert await queue.get() == "a"
        times.append(clock())
        queue.add("a")
        queue.done("a")
    steps = [b - a for a, b in pairwise(times)]
    assert all(step >= 0.045 for step in steps), steps


def test_delays_of_failures_double_up_to_a_minute_and_a_success_forgets_them() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        clock = asyncio.get_running_loop().time

        async def waits(turns: int) -> list[float]:
            found = []
            for _ in range(turns):
                queue.done("a", failed=True)
                began = clock()
                assert await queue.get() == "a"
                found.append(round(clock() - began, 6))
            return found

        doubling = [0.2 * 2**i for i in range(9)]
        queue.add("a")
        await queue.get()
        assert await waits(25) == pytest.approx([*doubling, *[60.0] * 16])
        queue.add("a")
        queue.done("a")
        assert await queue.get() == "a"
        assert await waits(2) == pytest.approx(doubling[:2])
        queue.close()
        queue.open([])
        assert await waits(1) == pytest.approx(doubling[:1]), "another leader begins anew"

    run_quickly(scenario)


@pytest.mark.parametrize("how", ["ready", "later", "failed", "enqueued again"])
def test_a_queue_that_is_closed_forgets_its_keys_and_takes_none(how: str) -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        if how == "later":
            queue.add_after("a", 5.0)
        else:
            queue.add("a")
        if how in ("failed", "enqueued again"):
            await queue.get()
        if how == "failed":
            queue.done("a", failed=True)
        if how == "enqueued again":
            queue.add("a")
        queue.close()
        if how == "enqueued again":
            queue.done("a", failed=True)  # Its worker was cancelled.
        queue.add("b")
        queue.add_after("c", 1.0)
        queue.open(["d"])
        assert await queue.get() == "d"
        assert await nothing_ready_for(queue, 600.0)
        queue.add("a")
        assert await queue.get() == "a", "forgotten jobs can be enqueued again"

    run_quickly(scenario)


async def nothing_ready_for(queue: WorkQueue[str], seconds: float) -> bool:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await queue.get()
    return True


def test_the_gap_follows_a_turn_and_nothing_of_a_job_stays_after_the_gap() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        clock = asyncio.get_running_loop().time
        queue.add("gpt")
        queue.done(await queue.get())
        queue.add("gpt")
        assert await queue.get() == "gpt" and clock() == pytest.approx(0.25)
        queue.done("gpt")
        await asyncio.sleep(0.3)
        queue.add("gpt")
        assert await queue.get() == "gpt" and clock() == pytest.approx(0.55)
        queue.done("gpt")
        await asyncio.sleep(0.3)
        assert "gpt" not in str(vars(queue)), "jobs that are gone add up"

    run_quickly(scenario, gap=0.25)


# --- the workers ----------------------------------------------------------------------------------


class Played:
    """Queue of a number of keys, and a reconciler whose outcomes the test sets."""

    def __init__(self, *outcomes: float | BaseException | None) -> None:
        self.outcomes = list(outcomes)
        self.ended: list[tuple[str, bool]] = []
        self.later: list[tuple[str, float]] = []

    async def get(self) -> Key:
        if len(self.ended) == len(self.outcomes):
            raise asyncio.CancelledError
        return "team", str(len(self.ended))

    def done(self, key: Key, *, failed: bool) -> None:
        self.ended.append((key[1], failed))

    def add_after(self, key: Key, seconds: float) -> None:
        self.later.append((key[1], seconds))

    async def reconcile(self, namespace: str, name: str) -> float | None:
        outcome = self.outcomes[int(name)]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def work(self) -> None:
        both: Any = self
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(operator.run_worker(both, both))


def reconciles(result: str) -> float:
    return sum(
        sample.value
        for metric in RECONCILES.collect()
        for sample in metric.samples
        if sample.name.endswith("_count") and sample.labels == {"result": result}
    )


def test_a_job_gets_another_turn_at_the_requested_time_but_not_before_the_gap() -> None:
    played = Played(None, 0.0, -5.0, operator.GAP_SECONDS, 0.3, 60.0)
    played.work()
    assert [failed for _, failed in played.ended] == [False] * 6
    gap = operator.GAP_SECONDS
    assert played.later == [("1", gap), ("2", gap), ("3", gap), ("4", 0.3), ("5", 60.0)]


def test_a_turn_that_fails_ends_no_other_and_comes_back_by_its_failures_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = reconciles("ok"), reconciles("error")
    away, broken = KubeApiError(503, "", "later"), ZeroDivisionError("no such luck")
    played = Played(away, broken, TimeoutError(), 1.0)
    with caplog.at_level(logging.WARNING):
        played.work()
    assert played.ended == [("0", True), ("1", True), ("2", True), ("3", False)]
    assert played.later == [("3", 1.0)]
    assert "team/0: will retry: 503" in caplog.text
    assert "team/1: reconcile failed" in caplog.text and "no such luck" in caplog.text
    assert (reconciles("ok"), reconciles("error")) == (before[0] + 1, before[1] + 3)


def test_a_turn_that_is_cancelled_is_over_and_has_failed() -> None:
    played = Played(asyncio.CancelledError(), 1.0)
    played.work()
    assert (played.ended, played.later) == ([("0", True)], [])


def test_a_leader_begins_with_all_jobs_and_leaves_no_work_behind() -> None:
    turns: list[str] = []
    waiting = asyncio.Event()

    class Reconciler:
        accusations = NodeAccusations()

        async def reconcile(self, namespace: str, name: str) -> None:
            turns.append(name)
            if len(turns) == 3:
                waiting.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        queue: WorkQueue[Key] = WorkQueue()
        queue.close()
        jobs = [("team", name) for name in "abcd"]
        reconciler: Any = Reconciler()
        reconciler.accusations.add_accusations("team/a", {"node": "slow"})
        leading = asyncio.create_task(
            operator.reconcile_while_leading(queue, reconciler, lambda: jobs, 3)
        )
        await waiting.wait()
        assert sorted(turns) == ["a", "b", "c"]
        leading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leading
        queue.add(("team", "e"))
        assert queue.describe_overdue() == "" and await nothing_ready_for(queue, 600.0)  # type: ignore[arg-type]
        assert reconciler.accusations.count_jobs("node") == 0

    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize(
    ("error", "stops"),
    [(None, False), (ZeroDivisionError(), True), (asyncio.CancelledError(), False)],
)
async def test_a_task_without_which_nothing_works_stops_the_process_if_it_fails(
    error: BaseException | None, stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def task() -> None:
        if error is not None:
            raise error

    stop = asyncio.Event()
    ended = asyncio.create_task(task())
    await asyncio.wait([ended])
    operator._stop_on_failure(stop, ended)
    assert stop.is_set() is stops
    assert ("a background task failed; exiting" in caplog.text) is stops
