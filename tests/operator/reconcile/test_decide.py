"""Decisions about a job, state by state; no cluster, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from operator_objects import T0, World, body, failed, job_facts, pod

from pipemorph.views.status.conditions import format_time
from pipemorph_operator.kube.job_object import dump_status, read_operator_status
from pipemorph_operator.kube.object_facts import JobFacts
from pipemorph_operator.reconcile.decide import DRAIN_SECONDS, report_internal_error


def test_a_new_job_gets_the_objects_of_attempt_0() -> None:
    world = World(body())
    decision = world.turn()
    assert [o["kind"] for o in decision.apply_objects] == ["Service", "ConfigMap", "Job"]
    assert world.status["attempt"] == 0
    assert world.status["state"] == "Starting"
    assert world.status["ready"] == "0/2"
    assert world.events == ["AttemptStarted"]
    assert world.counts == ["created"]
    assert world.status["startTime"] == format_time(T0)


def test_the_same_is_decided_when_nothing_changed() -> None:
    world = World(body())
    world.running()
    before = world.body["status"]
    decision = world.turn()
    assert decision.status is not None
    assert dump_status(decision.status) == before
    assert (decision.events, decision.apply_objects, decision.delete_jobs) == ([], [], [])


def test_an_operator_that_died_before_it_wrote_status_adopts_what_it_made() -> None:
    world = World(body())
    world.turn(write_status=False)
    decision = world.turn()
    assert decision.create_attempt is None
    assert world.status["jobUid"] == "job-0"
    assert (world.counts, world.events) == (["created"], ["AttemptStarted"])


def test_running_then_complete() -> None:
    world = World(body())
    world.turn()
    world.running()
    assert world.status["state"] == "Running"
    assert world.condition("PodsReady") == ("True", "AllRanksReady")
    world.jobs[0] = job_facts(active=0, succeeded=2, complete=True)
    world.settle()
    assert world.status["state"] == "Complete"
    assert world.status["ready"] == "2/2"
    assert world.counts == ["created", "successful"]


def test_nodes_of_slow_links_are_those_of_the_pods_with_these_ranks() -> None:
    world = World(body(stages=3, failurePolicy={"maxRestarts": 5}))
    world.running(ranks=3)
    world.pods = [pod(i, node=node) for i, node in enumerate("abc")]
    world.body["status"]["training"] = {"attempt": 0, "state": "training", "slowLinks": [SLOW]}
    places = [2, 1, 0]
    world.body["status"]["recoveries"] = {"attempt": 0, "generation": 1, "places": places}
    world.turn()
    assert [each["nodes"] for each in world.status["attemptNodes"]["links"]] == [["b", "a"]]


def test_ranks_that_have_ended_and_are_not_counted_yet_are_not_missing() -> None:
    world = World(body())
    world.running()
    world.jobs[0] = JobFacts.from_object(
        {
            "metadata": {"name": world.jobs[0].name, "uid": "job-0"},
            "status": {
                "active": 1,
                "ready": 1,
                "startTime": format_time(T0),
                "uncountedTerminatedPods": {"succeeded": ["u"]},
            },
        }
    )
    world.settle()
    assert (world.status["state"], world.status["ready"]) == ("Running", "2/2")


def test_ranks_that_have_all_ended_are_not_reported_as_running() -> None:
    """The Job says a moment later that it is complete."""
    world = World(body())
    world.turn()
    world.jobs[0] = job_facts(active=0, succeeded=2)
    world.settle()
    assert world.status["ready"] == "2/2"
    world.jobs[0] = job_facts(active=0, succeeded=2, complete=True)
    world.settle()
    assert world.events == ["AttemptStarted", "Complete"]


def test_an_internal_error_is_one_event_and_ranks_keep_running() -> None:
    world = World(body())
    world.running()

    def events_of(error: Exception) -> list[tuple[str, str]]:
        decision = report_internal_error(world.observe(), error)
        assert decision.status is not None
        world.body["status"] = dump_status(decision.status)
        assert world.condition("Running") == ("True", "InternalError")
        return [(event.kind, event.message.rpartition("; ")[2]) for event in decision.events]

    assert events_of(ValueError("x")) == [("Warning", "retrying: ValueError: x")]
    assert events_of(ValueError("x")) == []
    assert events_of(ValueError("y")) == [("Warning", "retrying: ValueError: y")]


@pytest.mark.parametrize(
    ("state", "attempt", "passed"),
    [("training", 0, True), ("starting", 0, False), ("training", 1, False)],
)
def test_the_preflight_has_passed_when_the_ranks_of_this_attempt_train(
    state: str, attempt: int, passed: bool
) -> None:
    world = World(body())
    world.running()
    world.body["status"]["training"] = {"attempt": attempt, "state": state}
    world.settle()
    found = [c for c in world.status["conditions"] if c["type"] == "PreflightPassed"]
    assert [(c["status"], c["reason"]) for c in found] == [("True", "AllRanksChecked")] * passed


def test_a_preflight_that_fails_is_a_condition() -> None:
    world = World(body())
    world.running()
    world.jobs[0] = job_facts(active=0, failed=failed())
    world.pods = [pod(0, exit_code=78)]
    world.settle()
    assert world.condition("PreflightPassed") == ("False", "PreflightFailed")
    assert world.condition("Failed")[0] == "True"


@pytest.mark.parametrize("complete", [True, False])
def test_what_an_attempt_had_goes_when_the_job_ends(complete: bool) -> None:
    """The PodGroup goes with the ConfigMap; it can hold the resources of a queue."""
    world = World(body())
    world.running()
    world.jobs[0] = job_facts(active=0, complete=complete, failed=None if complete else failed())
    decision = world.turn()
    assert world.status["state"] == ("Complete" if complete else "Failed")
    assert decision.delete_attempts == [job_facts().name]
    assert decision.delete_jobs == [], "the pods' logs are gone"


def test_what_an_attempt_had_goes_also_when_its_job_went_before() -> None:
    """A Job deleted by a user counts against no limit."""
    world = World(body())
    world.running()
    world.jobs.clear()
    world.turn()
    assert world.condition("PodsReady") == ("False", "Restarting")
    (record,) = world.status["attempts"]
    assert (record["reason"], record["counted"]) == ("JobDeleted", False)
    decision = world.settle()
    assert decision.delete_attempts == [job_facts().name]
    assert (world.status["attempt"], world.status["state"]) == (1, "Starting")
    world.jobs.clear()
    world.body["spec"]["suspend"] = True
    assert world.turn().delete_attempts == [job_facts(1).name], "its Secret and ConfigMap stay"


@pytest.mark.parametrize("terminal", ["Complete", "Failed"])
def test_a_terminal_state_wins_over_everything(terminal: str) -> None:
    world = World(body(activeDeadlineSeconds=10, failurePolicy={"maxRestarts": 5}))
    world.running()
    ended = {"complete": True} if terminal == "Complete" else {"failed": failed()}
    world.jobs[0] = job_facts(active=0, **ended)
    world.pods = [pod(0, exit_code=2)]
    world.settle()
    assert world.status["state"] == terminal
    world.later(100)
    world.body["spec"]["suspend"] = True
    world.jobs.clear()
    before = world.status
    decision = world.turn()
    assert world.status == before
    assert decision.create_attempt is None
    assert world.status["state"] == terminal


def test_a_failed_rank_restarts_all_under_the_next_number() -> None:
    world = World(body(failurePolicy={"maxRestarts": 1}))
    world.running()
    world.jobs[0] = job_facts(active=0, failed=failed())
    world.pods = [pod(1, exit_code=3, message="boom", node="n7"), pod(0, exit_code=1)]
    decision = world.turn()
    assert decision.create_attempt is None, "another attempt before its number is on record"
    assert world.status["attempt"] == 1
    assert world.status["restarts"] == 1
    assert world.status["attempts"][0]["reason"] == "RankFailed"
    assert "rank 0 (stage 0)" in world.status["attempts"][0]["message"]
    world.settle()
    assert world.status["jobUid"] == "job-1"
    assert 0 in world.jobs, "the failed attempt's pods, with their logs, are gone"
    assert world.counts == ["created", "restarted"]


def test_generations_without_progress_count_as_restarts() -> None:
    world = World(body(failurePolicy={"maxRestarts": 3}))
    world.running()
    generations = {"generation": 4, "count": 4, "counted": 2}
    world.body["status"]["recoveries"] = generations
    world.jobs[0] = job_facts(active=0, failed=failed())
    world.pods = [pod(0, exit_code=1)]
    world.turn()
    assert world.status["restarts"] == 1, "its own"
    world.settle()
    world.running(1)
    world.body["status"]["recoveries"] = generations
    world.jobs[1] = job_facts(1, active=0, failed=failed())
    world.pods = [pod(0, exit_code=1)]
    world.turn()
    assert world.status["state"] == "Failed"
    (found,) = [c for c in world.status["conditions"] if c["type"] == "Failed"]
    assert found["reason"] == "MaxRestartsExceeded" and "maxRestarts: 3" in found["message"]


def test_the_next_attempt_waits_for_the_last_ones_ranks_but_not_for_ever() -> None:
    world = World(body(failurePolicy={"maxRestarts": 1}))
    world.running()
    world.jobs[0] = job_facts(active=0, terminating=1, failing=failed())
    world.pods = [pod(0, exit_code=1)]
    world.turn()
    world.jobs[0] = job_facts(active=0, terminating=1, failing=failed(), deleting=True)
    world.turn()
    assert world.status["state"] == "Restarting"
    assert 1 not in world.jobs
    world.later(DRAIN_SECONDS + 1)
    world.settle()
    assert 1 in world.jobs


def test_suspended_while_the_last_ranks_end_it_is_resumed_with_the_next_attempt() -> None:
    world = World(body(failurePolicy={"maxRestarts": 1}))
    world.running()
    world.jobs[0] = job_facts(active=0, terminating=1, failing=failed())
    world.pods = [pod(0, exit_code=1)]
    world.turn()
    world.body["spec"]["suspend"] = True
    world.settle()
    assert (world.status["state"], world.jobs) == ("Suspended", {})
    world.body["spec"]["suspend"] = False
    world.settle()
    assert (world.status["attempt"], world.status["restarts"]) == (1, 1)
    assert [each["reason"] for each in world.status["attempts"]] == ["RankFailed"]


def test_a_crash_loop_waits_longer_each_time() -> None:
    world = World(body(failurePolicy={"maxRestarts": 10}))
    waits = []
    for attempt in range(4):
        world.running(attempt)
        world.jobs[attempt] = job_facts(attempt, active=0, failed=failed())
        world.turn()
        waited = 0.0
        while attempt + 1 not in world.jobs:
            decision = world.settle()
            if attempt + 1 in world.jobs:
                break
            assert decision.requeue_seconds is not None
            waited += decision.requeue_seconds
            world.later(decision.requeue_seconds)
        waits.append(round(waited))
    assert waits == [0, 1, 2, 4]


def test_disruptions_are_not_counted() -> None:
    world = World(body())
    world.running()
    world.jobs[0] = job_facts(active=0, failed=failed())
    world.pods = [pod(0, exit_code=137, disrupted=True, node="n1"), pod(1, exit_code=1)]
    world.settle()
    assert world.status["disruptions"] == 1
    assert world.status["restarts"] == 0
    assert world.status["attempt"] == 1


def test_with_no_restart_remaining_the_reason_is_the_ranks_own() -> None:
    world = World(body())
    world.running()
    world.jobs[0] = job_facts(active=0, failed=failed())
    world.pods = [pod(1, exit_code=9)]
    world.settle()
    assert world.condition("Failed") == ("True", "RankFailed")
    assert "rank 1" in world.message("Failed")


def test_suspend_before_the_start_uses_no_attempt() -> None:
    world = World(body(suspend=True))
    decision = world.turn()
    assert decision.create_attempt is None
    assert world.status["state"] == "Suspended"
    world.body["spec"]["suspend"] = False
    world.settle()
    assert world.status["attempt"] == 0


def test_suspend_deletes_the_job_and_resume_takes_the_next_number() -> None:
    world = World(body(activeDeadlineSeconds=100))
    world.running()
    world.body["spec"]["suspend"] = True
    decision = world.turn()
    assert decision.delete_jobs == [job_facts().name]
    assert decision.delete_attempts == [job_facts().name], "the secret outlives its attempt"
    assert world.condition("Suspended") == ("False", "RanksStopping")
    world.settle()
    assert world.status["state"] == "Suspended"
    assert world.status["attempts"][0]["counted"] is False
    world.later(1000)
    world.turn()
    assert world.status["state"] == "Suspended", "the deadline runs in suspension"
    world.body["spec"]["suspend"] = False
    world.settle()
    assert world.status["attempt"] == 1
    assert world.status["restarts"] == 0


def test_dying_between_status_and_deletion_counts_nothing_twice() -> None:
    world = World(body(failurePolicy={"maxRestarts": 3}))
    world.running()
    world.body["spec"]["suspend"] = True
    decision = world.turn(write_status=False)
    assert decision.status is not None
    world.body["status"] = dump_status(decision.status)
    world.settle()
    assert world.jobs == {}
    assert len(world.status["attempts"]) == 1


def test_time_to_live() -> None:
    world = World(body(ttlSecondsAfterFinished=30))
    world.running()
    world.jobs[0] = job_facts(active=0, complete=True)
    assert world.settle().requeue_seconds == 30
    world.later(31)
    assert world.turn().delete_job


def test_not_ours_or_on_its_way_out() -> None:
    theirs = World(body(managedBy="somebody.else/x"))
    assert theirs.turn().status is None
    leaving = World(body())
    leaving.body["metadata"]["deletionTimestamp"] = format_time(T0)
    assert leaving.turn().create_attempt is None


def test_a_spec_that_only_the_models_can_refuse_is_failed_once() -> None:
    job = body()
    job["spec"]["schedule"]["inFlightLimit"] = [0, 4]
    world = World(job)
    world.settle()
    assert world.condition("Failed") == ("True", "InvalidSpec")
    assert "spec.schedule.inFlightLimit" in world.message("Failed")
    world.turn()
    assert world.events == ["InvalidSpec"]


EIGHT = {"stages": 2, "replicas": 8, "ranksPerPod": 8}


def test_pods_of_several_ranks() -> None:
    limits = {"nvidia.com/gpu": "9"}
    container = {"name": "trainer", "image": "i", "resources": {"limits": limits}}
    world = World(body(parallelism=EIGHT, template={"spec": {"containers": [container]}}))
    world.turn()
    assert "IdleGPUs" in world.events, "nine GPUs and eight ranks"
    assert world.status["pods"]["wanted"] == 2
    world.jobs[0] = job_facts(0, stages=2, active=2, ready=1)
    world.settle()
    assert world.status["ready"] == "1/2"
    assert world.message("Running") == "8 of 16 ranks are ready"
    world.jobs[0] = job_facts(0, stages=2, active=2, ready=2)
    world.settle()
    assert world.condition("Running") == ("True", "NoReportsYet")
    assert world.events.count("IdleGPUs") == world.events.count("SmallSharedMemory") == 1


def test_pods_of_one_rank_and_those_with_shared_memory_get_no_such_warning() -> None:
    for spec in ({}, {"parallelism": EIGHT, "placement": {"sharedMemory": "16Gi"}}):
        world = World(body(**spec))
        world.turn()
        assert world.status["attempt"] == 0
        assert "SmallSharedMemory" not in world.events


SLOW = {
    "link": 1, "replica": 0, "direction": "forward",
    "delayMs": 50.0, "wireTimeMs": 51.0, "confidence": 1.0,
}  # fmt: skip


def after(
    *attempts: tuple[str, ...],
    slow_at_the_end: bool = True,
    suspended: bool = False,
    pods_gone: bool = False,
    **more: object,
) -> World:
    """A job of three ranks after attempts on those nodes, link 1 slow in all of them; and the
    next attempt, started."""
    rule = {"nodeExclusion": {"enabled": True}}
    world = World(body(stages=3, failurePolicy={"maxRestarts": 5}, placement=rule, **more))
    for attempt, nodes in enumerate(attempts):
        world.running(attempt, ranks=3)
        world.pods = [pod(i, node=node) for i, node in enumerate(nodes)]
        world.body["status"]["training"] = {"attempt": attempt, "slowLinks": [SLOW]}
        world.settle()
        if not slow_at_the_end:
            world.body["status"]["training"]["slowLinks"] = []
        if suspended:
            world.body["spec"]["suspend"] = True
            world.settle()
            world.body["spec"]["suspend"] = False
        else:
            world.jobs[attempt] = job_facts(attempt, stages=3, active=0, failed=failed())
            if pods_gone:
                world.pods = []
            world.turn()
        world.later(60)
        world.settle()
    return world


def node_affinity(world: World) -> str:
    """Node affinity of the attempt in status, made again."""
    world.jobs.clear()
    world.body["status"] = {k: v for k, v in world.status.items() if k != "jobUid"}
    made = world.turn().apply_objects[-1]["spec"]["template"]["spec"]
    return str(made.get("affinity", {}).get("nodeAffinity", {}))


def test_nodes_of_slow_links_are_recorded_and_avoided() -> None:
    world = after(("a", "b", "c"), ("d", "e", "b"))
    assert [n["name"] for n in world.status["nodes"] if n["excluded"]] == ["b"]
    assert "NodeExcluded" in world.events
    found = node_affinity(world)
    assert "required" in found
    assert "'NotIn', 'values': ['b']" in found
    assert "preferred" not in found


def test_nodes_are_known_although_their_pods_are_gone_when_the_attempt_has_ended() -> None:
    world = after(("a", "b", "c"), ("d", "e", "b"), pods_gone=True)
    assert [n["name"] for n in world.status["nodes"] if n["excluded"]] == ["b"]
    assert "attemptNodes" not in world.status, "they belong to an attempt"
    world = after(("a", "b", "c"), ("a", "b", "c"), pods_gone=True)
    assert not any(n["excluded"] for n in world.status["nodes"]), "there are no other nodes"


def test_nodes_are_known_of_an_attempt_that_fails_as_soon_as_its_pods_are_seen() -> None:
    """Pods came, a link was slow, and the attempt failed between two looks at the job."""
    world = after(("a", "b", "c"))
    world.running(1, ranks=3)
    world.pods = [pod(i, node=node) for i, node in enumerate("deb")]
    world.body["status"]["training"] = {"attempt": 1, "slowLinks": [SLOW]}
    world.jobs[1] = job_facts(1, stages=3, active=0, failed=failed())
    world.turn()
    assert [n["name"] for n in world.status["nodes"] if n["excluded"]] == ["b"]


def test_where_there_are_no_other_nodes_the_slow_ones_are_still_used() -> None:
    world = after(("a", "b", "c"), ("a", "b", "c"))
    assert not any(n["excluded"] for n in world.status["nodes"])
    assert "NodeExcluded" not in world.events
    found = node_affinity(world)
    assert "required" not in found
    assert "preferred" in found
    assert "['b']" in found
    assert "['c']" in found


def test_a_job_on_one_node_avoids_none() -> None:
    world = after(("a", "a", "a"), ("a", "a", "a"))
    assert "nodes" not in world.status or world.status["nodes"] == []
    assert node_affinity(world) == "{}"


@pytest.mark.parametrize(
    "otherwise",
    [
        {"slow_at_the_end": False},
        {"suspended": True},
        {"faults": [{"link": 1, "delayMs": 50.0}]},
    ],
    ids=["well again", "suspended", "injected"],
)
def test_nodes_are_not_accused_of_what_is_no_sickness_of_theirs(otherwise: Any) -> None:
    world = after(("a", "b", "c"), ("d", "e", "b"), **otherwise)
    assert world.status["attempt"] == 2
    assert not world.status.get("nodes")
    assert node_affinity(world) == "{}"


def test_with_the_rule_switched_off_nothing_is_avoided_any_more() -> None:
    world = after(("a", "b", "c"), ("d", "e", "b"))
    world.body["spec"]["placement"]["nodeExclusion"]["enabled"] = False
    assert node_affinity(world) == "{}"


def test_the_operators_part_of_status_leaves_out_the_ingests() -> None:
    job = body()
    mine = {"type": "Running", "status": "True", "reason": "A", "message": "",
            "lastTransitionTime": format_time(T0)}  # fmt: skip
    job["status"] = {
        "training": {"iteration": 3},
        "control": {"attempt": 0, "planVersion": 1},
        "conditions": [mine, mine | {"type": "LinksHealthy"}],
    }
    part = dump_status(read_operator_status(job))
    assert "training" not in part
    assert "control" not in part
    assert [c["type"] for c in part["conditions"]] == ["Running"]
