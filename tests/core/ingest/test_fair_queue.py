"""Whose decision is next."""

from __future__ import annotations

import pytest

from pipemorph.ingest.fair_queue import CREDIT_SECONDS, FORGET_SECONDS, Entry, FairQueue

BUDGET = 1e6


def run(queue: FairQueue[str], decisions: int, now: float = 0.0) -> list[str]:
    """Make decisions one after the other, each as long as estimated; who had them."""
    made = []
    for _ in range(decisions):
        entry = queue.take(now)
        if entry is None:
            break
        queue.settle(entry, entry.cost, entry.cost, now)
        made.append(entry.item)
    return made


def test_namespaces_take_turns_however_many_jobs_they_have() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    for i in range(10):
        queue.put(("many", f"{i}"), f"many-{i}", 1.0, 0.0)
    for i in range(2):
        queue.put(("few", f"{i}"), f"few-{i}", 1.0, 0.0)
    made = run(queue, 12)
    assert made[:5] == ["many-0", "few-0", "many-1", "few-1", "many-2"]
    assert len(queue) == 0


def test_jobs_take_turns_by_the_time_that_they_have_used() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    for i in range(4):
        queue.put(("n", "large"), f"large-{i}", 3.0, 0.0)
    for i in range(8):
        queue.put(("n", "small"), f"small-{i}", 1.0, 0.0)
    made = run(queue, 12)
    # While both wait, each has half of the time.
    assert made[:8] == [
        "small-0", "small-1", "large-0", "small-2", "small-3", "small-4", "large-1", "small-5",
    ]  # fmt: skip


def test_the_shortest_comes_first_but_not_for_ever() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    queue.put(("n", "long"), "long", 1.0, 0.0)
    made = []
    for i in range(30):
        queue.put(("n", f"{i}"), f"{i}", 0.1, 0.0)
        made += run(queue, 1)
    assert made[:3] == ["0", "1", "2"]
    assert 15 < made.index("long") < 22, "when all others together have had as much again"


def test_a_namespace_that_has_used_much_does_not_delay_one_that_comes() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    for i in range(20):
        queue.put(("flood", f"{i}"), f"flood-{i}", 50.0, 0.0)
    assert len(run(queue, 10)) == 10
    queue.put(("late", "a"), "late-a", 1.0, 1.0)
    queue.put(("late", "b"), "late-b", 1.0, 1.0)
    assert run(queue, 2) == ["late-a", "late-b"]


def test_an_urgent_decision_comes_before_all_that_may_wait() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    for i in range(100):
        queue.put(("n", f"{i}"), f"waits-{i}", 0.01, 0.0)
        queue.put((f"n{i}", "j"), f"waits-{i}", 0.01, 0.0)
    queue.put(("n", "100"), "urgent", 0.1, 0.0, urgent=True)
    queue.put(("other", "j"), "urgent", 1.0, 0.0, urgent=True)
    made = run(queue, 20)
    assert made[:2] == ["urgent", "urgent"]


def test_who_is_always_in_a_hurry_gains_two_seconds_once() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    made = []
    for i in range(200):
        queue.put(("greedy", "j"), "greedy", 0.1, 0.0, urgent=True)
        queue.put(("modest", f"{i}"), "modest", 0.1, 0.0)
        made += run(queue, 1)
    first = made.index("modest")
    assert CREDIT_SECONDS / 0.1 <= first <= CREDIT_SECONDS / 0.1 + 2
    assert abs(made[first:].count("modest") - made[first:].count("greedy")) <= 2


def test_a_pause_saves_up_nothing() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    queue.put(("idle", "a"), "idle", 1.0, 0.0)
    run(queue, 1)
    for _ in range(100):
        queue.put(("busy", "a"), "busy", 1.0, 0.0)
    run(queue, 50)
    for _ in range(50):
        queue.put(("idle", "a"), "idle", 1.0, 0.0)
    made = run(queue, 20)
    assert abs(made.count("idle") - made.count("busy")) <= 2


def test_what_is_being_made_counts_before_it_is_done() -> None:
    """Or all processes would work for one namespace."""
    queue: FairQueue[str] = FairQueue(BUDGET)
    for i in range(3):
        queue.put(("a", f"{i}"), "a", 5.0, 0.0)
        queue.put(("b", f"{i}"), "b", 5.0, 0.0)
    first, second = queue.take(0.0), queue.take(0.0)
    assert first is not None and second is not None
    assert {first.item, second.item} == {"a", "b"}


def test_long_ones_are_passed_over_where_only_short_ones_may_run() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    queue.put(("a", "a"), "long", 5.0, 0.0)
    queue.put(("b", "b"), "short", 0.1, 0.0)
    entry = queue.take(0.0, longest=0.3)
    assert entry is not None and entry.item == "short"
    assert queue.take(0.0, longest=0.3) is None


def test_a_job_whose_decisions_take_longer_than_estimated_is_known_for_it() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    assert queue.cost(("a", "a"), 0.1) == 0.1
    entry = queue.put(("a", "a"), "x", 0.1, 0.0)
    assert queue.take(0.0) is entry
    queue.settle(entry, 0.1, 1.0, 1.0)
    assert queue.cost(("a", "a"), 0.1) == pytest.approx(1.0)
    assert queue.cost(("a", "b"), 0.1) == 0.1


def spend(queue: FairQueue[str], seconds: float, now: float) -> None:
    entry = queue.put(("a", "greedy"), "greedy", 1.0, now)
    assert queue.take(now) is entry
    queue.settle(entry, 1.0, seconds, now)


@pytest.mark.parametrize(("seconds", "waits"), [(25.0, 15.0), (1000.0, 60.0)])
def test_a_job_over_its_budget_waits_for_a_minute_at_most(seconds: float, waits: float) -> None:
    queue: FairQueue[str] = FairQueue(20.0)
    spend(queue, seconds, 100.0)
    queue.put(("a", "greedy"), "more", 1.0, 100.0)
    queue.put(("a", "other"), "other", 1.0, 100.0)
    assert run(queue, 2, 100.0) == ["other"]
    assert list(queue.newly_over_budget(100.0)) == [("a", "greedy")]
    assert list(queue.newly_over_budget(101.0)) == [], "once"
    assert queue.due(101.0) == pytest.approx(waits - 1)
    assert run(queue, 1, 99.9 + waits) == []
    assert run(queue, 1, 100.1 + waits) == ["more"]
    assert queue.due(200.0) is None
    # Again, but only after it had the whole budget in between.
    spend(queue, 25.0, 400.0)
    queue.put(("a", "greedy"), "more", 1.0, 400.0)
    assert list(queue.newly_over_budget(400.0)) == [("a", "greedy")]


def test_what_is_dropped_is_not_made() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    gone: Entry[str] = queue.put(("a", "gone"), "gone", 1.0, 0.0)
    queue.put(("a", "stays"), "stays", 1.0, 0.0)
    queue.drop(gone)
    assert len(queue) == 1
    assert run(queue, 2) == ["stays"]


def test_jobs_that_are_gone_are_forgotten() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET)
    for i in range(50):
        queue.put((f"{i}", "a"), "x", 1.0, 0.0)
    waits = queue.put(("waits", "a"), "waits", 1e9, 0.0)
    run(queue, 50)
    queue.put(("new", "a"), "x", 1.0, 1.0 + FORGET_SECONDS)
    assert set(queue._namespaces) == {"new", "waits"}
    assert {queue.take(0.0), queue.take(0.0)} > {waits}
