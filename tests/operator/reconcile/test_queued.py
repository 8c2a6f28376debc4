"""Jobs that a queue holds, lets in and evicts, and the deadline, which does not count the wait."""

from __future__ import annotations

from operator_objects import World, body, job_facts

from pipemorph.views.status.conditions import format_time


def test_kueue_holds_and_evicts() -> None:
    world = World(body(placement={"gang": {"kueue": {"queue": "q"}}}))
    decision = world.turn()
    made = decision.apply_objects[-1]
    assert "suspend" not in made["spec"]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    world.jobs[0] = job_facts(active=0, suspended=True)
    world.turn()
    assert world.status["state"] == "Queued"
    world.running()
    world.jobs[0] = job_facts(active=0, suspended=True)
    world.settle()
    assert world.status["attempts"][0]["reason"] == "Evicted"
    assert world.status["attempt"] == 1, "reports of a re-admitted attempt would be replays"
    assert world.status["restarts"] == 0


def test_the_wait_in_a_queue_is_no_part_of_the_deadline() -> None:
    queue = {"gang": {"kueue": {"queue": "q"}}}
    world = World(body(placement=queue, activeDeadlineSeconds=60))
    world.turn()
    world.jobs[0] = job_facts(active=0, suspended=True)
    world.turn()
    world.later(3600)
    world.settle()
    assert world.status["state"] == "Queued"
    world.running()
    assert world.status["startTime"] == format_time(world.now)
    world.later(61)
    world.settle()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")


def test_ranks_that_were_evicted_before_all_were_ready_come_back_as_another_attempt() -> None:
    """An evicted rank may have reported, and what it says again would be a replay."""
    world = World(body(placement={"gang": {"kueue": {"queue": "q"}}}))
    world.turn()
    world.jobs[0] = job_facts(active=2)
    world.turn()
    world.jobs[0] = job_facts(active=0, suspended=True)
    world.settle()
    assert (world.status["attempt"], world.status["disruptions"]) == (1, 1)


def test_ranks_that_were_evicted_and_let_in_again_unseen_come_back_as_another_attempt() -> None:
    """The ranks run under the number of those before, whose reports theirs would repeat."""
    world = World(body(placement={"gang": {"kueue": {"queue": "q"}}}, activeDeadlineSeconds=60))
    world.turn()
    world.jobs[0] = job_facts(active=0, suspended=True, started_at=None)
    world.settle()
    assert (world.status["state"], world.status["attempt"]) == ("Queued", 0)
    world.running()
    world.turn()
    assert world.status["attempt"] == 0
    world.later(30)
    world.jobs[0] = job_facts(ready=2, started_at=world.now)
    world.settle()
    assert world.status["attempts"][0]["reason"] == "Evicted"
    assert (world.status["attempt"], world.status["disruptions"]) == (1, 1)


def test_a_job_whose_queue_has_just_let_it_in_is_not_evicted() -> None:
    """The job's own controller says a moment later that it has begun."""
    world = World(body(placement={"gang": {"kueue": {"queue": "q"}}}))
    world.turn()
    world.jobs[0] = job_facts(active=0, started_at=None)
    world.turn()
    world.running()
    assert (world.status["state"], world.status["attempt"]) == ("Running", 0)


def test_a_deadline_is_over_all_the_time_that_ranks_ran() -> None:
    world = World(body(activeDeadlineSeconds=3600))
    world.running()
    for attempt in (0, 1):
        world.later(1500)
        world.body["spec"]["suspend"] = True
        world.settle()
        world.later(100_000)
        world.turn()
        assert world.status["state"] == "Suspended"
        assert world.status["ranSeconds"] == 1500 * (attempt + 1)
        world.body["spec"]["suspend"] = False
        world.settle()
        world.running(attempt + 1)
    world.later(601)
    world.settle()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")


def test_a_deadline_counts_the_time_before_an_eviction() -> None:
    world = World(body(placement={"gang": {"kueue": {"queue": "q"}}}, activeDeadlineSeconds=60))
    world.running()
    world.later(50)
    world.jobs[0] = job_facts(active=0, suspended=True)
    world.settle()
    world.jobs[1] = job_facts(1, active=0, suspended=True, started_at=None)
    world.settle()
    assert world.status["state"] == "Queued"
    world.later(3600)
    world.jobs[1] = job_facts(1, ready=2, started_at=world.now)
    world.settle()
    assert world.status["state"] == "Running"
    world.later(11)
    world.settle()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")


def test_a_queue_that_evicts_often_is_not_taken_for_a_crash_loop() -> None:
    world = World(body(placement={"gang": {"kueue": {"queue": "q"}}}))
    for attempt in range(4):
        world.running(attempt)
        world.jobs[attempt] = job_facts(attempt, active=0, suspended=True)
        world.settle()
    assert world.status["attempt"] == 4
    assert 4 in world.jobs, "the next attempt waits"


def test_deadline() -> None:
    world = World(body(activeDeadlineSeconds=60))
    world.running()
    decision = world.turn()
    assert decision.requeue_seconds <= 60
    world.later(61)
    world.settle()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")
    assert world.jobs == {}, "ranks go on after the deadline"
