"""Policies, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from operator_objects import T0, failed, pod

from pipemorph.exits import EXIT_NO_RESTART, EXIT_SAVED
from pipemorph.spec.job_status import MAX_NODES_KEPT, Condition, NodeRecord
from pipemorph.spec.layout import RankLayout
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.sections.placement import NodeExclusion
from pipemorph.spec.status_links import AttemptNodes, SlowLink
from pipemorph.views.status.conditions import format_time, update_condition
from pipemorph_operator import names
from pipemorph_operator.kube.object_facts import PodFacts
from pipemorph_operator.policy import attempt_end, conditions, lifetime, node_exclusion

TWO, FOUR = (Parallelism(stages=n, replicas=n, order=["dp_replicate", "pp"]) for n in (2, 4))


def test_managed_by() -> None:
    assert [lifetime.is_managed_here(x) for x in (None, "", names.CONTROLLER, "other/x")] == [
        True, True, True, False,
    ]  # fmt: skip


def test_a_transition_time_moves_with_the_status_only() -> None:
    later = T0 + timedelta(seconds=9)
    first = update_condition([], "A", "True", "R", "m", generation=1, now=T0)
    same = update_condition(first, "A", "True", "Other", "n", generation=2, now=later)
    assert same[0].last_transition_time == format_time(T0)
    assert (same[0].reason, same[0].observed_generation) == ("Other", 2)
    turned = update_condition(same, "A", "False", "R", "m", generation=2, now=later)
    assert turned[0].last_transition_time == format_time(later)
    assert conditions.is_condition_true(first, "A")
    assert not conditions.is_condition_true(turned, "A")
    assert len(update_condition(turned, "B", "True", "R", "", generation=1, now=T0)) == 2


def test_seconds_until_a_pod_is_lost() -> None:
    later = T0 + timedelta(seconds=12)
    assert lifetime.seconds_until_deletion(None, T0, T0) is None
    assert lifetime.seconds_until_deletion(10, None, T0) is None
    assert lifetime.seconds_until_deletion(10, T0, T0) == 10
    assert lifetime.seconds_until_deletion(10, T0, later) == -2
    assert lifetime.seconds_until_deadline(None, 0, T0, T0) is None
    assert lifetime.seconds_until_deadline(10, 99, None, T0) is None, "time passes in suspension"
    assert lifetime.seconds_until_deadline(10, 0, T0, T0) == 10
    assert lifetime.seconds_until_deadline(10, 3, T0, later) == -5


def of(kind: str, status: str = "True", reason: str = "R") -> Condition:
    values = {"type": kind, "status": status, "reason": reason, "message": ""}
    return Condition.model_validate(values | {"lastTransitionTime": format_time(T0)})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], "Pending"),
        ([of("Running")], "Running"),
        ([of("Running", "False", names.R_WAITING_FOR_PODS)], "Starting"),
        ([of("Running", "False", names.R_QUEUED)], "Queued"),
        ([of("Running", "False", names.R_RESTARTING)], "Restarting"),
        ([of("Running", "False", names.R_DRAINING)], "Restarting"),
        ([of("Running"), of("Suspended")], "Suspended"),
        ([of("Suspended"), of("Failed")], "Failed"),
        ([of("Failed"), of("Complete")], "Complete"),
    ],
)
def test_state_in_one_word(found: list[Condition], expected: str) -> None:
    assert conditions.derive_job_state(found) == expected


def test_the_first_rank_to_fail_is_named_in_its_own_words() -> None:
    pods = [
        pod(0, exit_code=1, finished_at=T0 + timedelta(seconds=2), message="peer lost"),
        pod(5, exit_code=4, finished_at=T0, message="out of memory", node="n5"),
        pod(1, exit_code=0),
        pod(2),
    ]
    cause = attempt_end.classify_failure(failed(), pods, FOUR)
    assert cause.reason == names.R_RANK_FAILED
    assert cause.message == (
        "rank 5 (stage 1, replica 1) on node n5 exited with code 4: out of memory"
    )
    assert cause.counted
    assert cause.retry


def test_unusable_input_is_not_tried_again_if_it_was_the_first_to_be_found() -> None:
    later = T0 + timedelta(seconds=1)
    first = [pod(0, exit_code=1, finished_at=T0), pod(1, exit_code=2, finished_at=T0)]
    cause = attempt_end.classify_failure(failed(), first, FOUR)
    assert (cause.reason, cause.retry) == (names.R_INVALID_INPUT, False)
    assert cause.message.startswith("rank 1")
    followed = [pod(0, exit_code=1, finished_at=T0), pod(1, exit_code=2, finished_at=later)]
    cause = attempt_end.classify_failure(failed(), followed, FOUR)
    assert (cause.reason, cause.retry, cause.counted) == (names.R_RANK_FAILED, True, True)
    assert cause.message.startswith("rank 0")


@pytest.mark.parametrize("code", [names.EXIT_INVALID_INPUT, names.EXIT_PREFLIGHT])
def test_a_disruption_wins_over_what_another_rank_says_of_it(code: int) -> None:
    preempted = pod(0, exit_code=137, disrupted=True, node="n0", finished_at=T0)
    for at in (-1, 1):
        other = pod(1, exit_code=code, finished_at=T0 + timedelta(seconds=at))
        cause = attempt_end.classify_failure(failed(), [preempted, other], TWO)
        assert (cause.reason, cause.retry, cause.counted) == (names.R_DISRUPTED, True, False)
    by_rule = failed("Pod a/b has condition DisruptionTarget matching FailJob rule at index 0")
    gone = [pod(1, exit_code=code, finished_at=T0)]
    assert attempt_end.classify_failure(by_rule, gone, TWO).reason == names.R_DISRUPTED


def test_a_disruption_is_known_by_the_pod_or_by_the_rule() -> None:
    by_pod = attempt_end.classify_failure(failed(), [pod(0, disrupted=True, exit_code=137)], TWO)
    by_rule = attempt_end.classify_failure(
        failed("Pod a/b has condition DisruptionTarget matching FailJob rule at index 0"), [], TWO
    )
    assert {by_pod.reason, by_rule.reason} == {names.R_DISRUPTED}
    assert not by_pod.counted
    assert not by_rule.counted
    other = attempt_end.classify_failure(
        failed("exit code 1 matching FailJob rule at index 1"), [], TWO
    )
    assert other.counted


def test_ranks_that_saved_on_request_do_not_count() -> None:
    later = T0 + timedelta(seconds=1)
    killed = pod(0, exit_code=137, node="n0", finished_at=later)
    saved = pod(1, exit_code=EXIT_SAVED, node="n1", finished_at=T0)
    by_rule = failed("matching FailJob rule at index 1")
    cause = attempt_end.classify_failure(by_rule, [killed, saved], TWO, saves=True)
    assert (cause.reason, cause.retry, cause.counted) == (names.R_SAVED, True, False)
    assert cause.message.startswith("saved a checkpoint and ended on request: rank 1 (stage 1"), (
        cause
    )
    # A rank that had failed before is why the others were to end.
    crashed = pod(0, exit_code=1, finished_at=T0 - timedelta(seconds=1))
    assert attempt_end.classify_failure(failed(), [crashed, saved], TWO, saves=True).counted
    # A program may have the code for something else.
    assert attempt_end.classify_failure(by_rule, [killed, saved], TWO).reason == names.R_RANK_FAILED


@pytest.mark.parametrize(
    ("code", "reason", "retry", "counted"),
    [
        (1, names.R_RANK_FAILED, True, True),
        (names.EXIT_INVALID_INPUT, names.R_INVALID_INPUT, False, True),
        (EXIT_NO_RESTART, names.R_RANK_FAILED, False, True),
        (names.EXIT_PREFLIGHT, names.R_PREFLIGHT_FAILED, True, True),
        (EXIT_SAVED, names.R_SAVED, True, False),
    ],
)
def test_what_pods_that_are_gone_exited_with_is_in_the_condition(
    code: int, reason: str, retry: bool, counted: bool
) -> None:
    by_rule = failed(
        f"Container trainer for pod a/b-0-1-x failed with exit code {code} "
        "matching FailJob rule at index 1"
    )
    cause = attempt_end.classify_failure(by_rule, [], TWO, saves=True)
    assert (cause.reason, cause.retry, cause.counted) == (reason, retry, counted)
    assert by_rule.message in cause.message


def test_a_pod_of_several_ranks_tells_in_its_message_which_one_failed() -> None:
    said = pod(1, exit_code=41, node="n1", finished_at=T0, message="rank 11 exited with code 41")
    cause = attempt_end.classify_failure(
        failed(), [said], Parallelism(stages=2, replicas=8, ranks_per_pod=8)
    )
    assert cause.message == (
        "pod 1 (ranks 8 to 15) on node n1 exited with code 41: rank 11 exited with code 41"
    )


def test_pods_are_called_by_their_ranks_wherever_these_are() -> None:
    cut, layout = Parallelism(stages=2, replicas=2), RankLayout(places=(0, 3, 2, 1))
    assert attempt_end.format_ranks(3, cut) == "rank 3 (stage 1, replica 1)"
    assert attempt_end.format_ranks(3, cut, layout) == "rank 1 (stage 0, replica 1) in pod 3"
    assert attempt_end.format_ranks(0, cut, layout) == "rank 0 (stage 0, replica 0)"
    several = Parallelism(stages=2, replicas=8, ranks_per_pod=8)
    assert attempt_end.format_ranks(1, several) == "pod 1 (ranks 8 to 15)"
    pairs, moved = several.model_copy(update={"replicas": 2, "ranks_per_pod": 2}), layout
    assert attempt_end.format_ranks(1, pairs, moved) == "pod 1 (ranks 2, 1)"
    gone = pod(3, exit_code=41, finished_at=T0, message="no GPU")
    cause = attempt_end.classify_failure(failed(), [gone], cut, layout=layout)
    assert cause.message == "rank 1 (stage 0, replica 1) in pod 3 exited with code 41: no GPU"


def test_the_same_failure_twice_is_not_tried_again_whichever_rank_ended_first() -> None:
    later = T0 + timedelta(seconds=5)
    pods = [
        pod(0, exit_code=1, finished_at=T0),
        pod(1, exit_code=EXIT_NO_RESTART, finished_at=later, message="iteration 5 failed twice"),
    ]
    cause = attempt_end.classify_failure(failed(), pods, TWO)
    assert not cause.retry and cause.reason == names.R_RANK_FAILED
    assert "iteration 5 failed twice" in cause.message


@pytest.mark.parametrize(
    ("node", "deleted", "seconds"),
    [("n", True, 30.0 + attempt_end.LOST_SECONDS - 5.0), (None, True, None), ("n", False, None)],
)
def test_only_a_pod_on_a_node_that_is_being_deleted_can_be_lost(
    node: str | None, deleted: bool, seconds: float | None
) -> None:
    gone_by = T0 if deleted else None
    found = replace(
        pod(0), node=node, deletion_deadline=gone_by, grace_seconds=30.0, ending_seconds=5.0
    )
    assert attempt_end.seconds_until_lost(found) == seconds
    overdue = replace(found, ending_seconds=1e4)
    assert (attempt_end.detect_lost_node([overdue], TWO) is not None) is (seconds is not None)


def test_a_node_that_reported_the_end_of_a_deleted_pod_responds() -> None:
    # As the API server shows it until the Job controller has removed its finalizer.
    found = PodFacts.from_object(
        {
            "metadata": {
                "name": "gpt-0-1",
                "deletionTimestamp": "2026-01-01T00:00:00Z",
                "deletionGracePeriodSeconds": 0,
                "finalizers": ["batch.kubernetes.io/job-tracking"],
            },
            "spec": {"nodeName": "n"},
            "status": {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "trainer", "state": {"terminated": {"exitCode": EXIT_SAVED}}}
                ],
            },
        }
    )
    slow = replace(found, ending_seconds=60.0)
    assert attempt_end.detect_lost_node([slow], TWO) is None
    assert attempt_end.seconds_until_lost(slow) is None
    cause = attempt_end.classify_failure(failed(), [slow], TWO, saves=True)
    assert cause.reason == names.R_SAVED


def test_delays_grow_and_end() -> None:
    delays = [attempt_end.compute_restart_delay(n) for n in range(20)]
    assert delays[:5] == [0, 0, 1, 2, 4]
    assert delays == sorted(delays)
    assert delays[-1] == attempt_end.LAST_DELAY_SECONDS


def link(number: int, replica: int = 0) -> SlowLink:
    return SlowLink(
        link=number, replica=replica, direction="forward", delay_ms=1, wire_time_ms=1, confidence=1
    )


def test_ends_of_a_link() -> None:
    assert node_exclusion.find_link_ends(link(1), FOUR.mesh) == (1, 2)
    assert node_exclusion.find_link_ends(link(0, replica=2), FOUR.mesh) == (8, 9)
    by_default = MeshShape(stages=4, replicas=3, tensor=2)
    assert node_exclusion.find_link_ends(link(0, replica=5), by_default) == (5, 11)


def fault(number: int, replica: int = 0) -> Fault:
    return Fault.model_validate({"link": number, "replica": replica, "delayMs": 50.0})


def test_both_nodes_of_a_slow_link_are_suspects() -> None:
    nodes = {0: "a", 1: "b", 2: "b", 3: "c"}

    def found(*slow: SlowLink, of: Mapping[int, str] = nodes) -> set[str]:
        seen = node_exclusion.add_slow_link_nodes(None, slow, of, [], FOUR.mesh)
        return {*node_exclusion.find_suspects(seen, slow, [])}

    assert found(link(0)) == {"a", "b"}
    assert found(link(1)) == set(), "both ends on one node"
    assert found(link(0), link(2)) == {"a", "b", "c"}
    assert found(link(0), of={0: "a"}) == set(), "maybe on one node"


def test_a_link_that_the_jobs_own_faults_slow_accuses_no_node() -> None:
    nodes = {0: "a", 1: "b", 2: "c", 3: "d"}
    both = [link(0), link(0, replica=1)]
    seen = node_exclusion.add_slow_link_nodes(None, both, nodes, [], TWO.mesh)
    assert {*node_exclusion.find_suspects(seen, both, [fault(0)])} == {"c", "d"}
    assert not node_exclusion.find_suspects(seen, both, [fault(0), fault(0, 1)])


def test_nodes_noted_later_are_counted_once() -> None:
    nodes = dict(enumerate("abcd"))
    first = node_exclusion.add_slow_link_nodes(None, [link(0)], nodes, [], FOUR.mesh)
    assert (first.count, first.others) == (4, 2), "c and d have no name here"
    # Half of the pods are gone by now.
    later = node_exclusion.add_slow_link_nodes(first, [link(1)], {1: "b", 2: "c"}, [], FOUR.mesh)
    assert (later.count, later.others) == (4, 1), "d has none"
    assert {*node_exclusion.find_suspects(later, [link(1)], [])} == {"b", "c"}, (
        "link 0 has recovered"
    )


def noted(nodes: Iterable[str], *records: NodeRecord) -> AttemptNodes:
    """Record of an attempt of two stages with ranks on these nodes, all links slow."""
    ranks = [node for node in sorted(nodes) for _ in range(2)]
    mesh = MeshShape(2, replicas=len(ranks) // 2, order=("dp_replicate", "pp"))
    slow = [link(0, replica) for replica in range(mesh.replicas)]
    return node_exclusion.add_slow_link_nodes(None, slow, dict(enumerate(ranks)), records, mesh)


MANY = noted({"k", "l", "m", "n"})
"""Nodes that an attempt ran on besides the accused."""


def test_a_node_accused_in_several_attempts_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_exclusion, "MAX_EXCLUDED", 1)
    rule = NodeExclusion()
    records = node_exclusion.add_suspects([], {"a", "b"}, 0, rule, noted({"a", "b"}))
    records = node_exclusion.add_suspects(records, {"a"}, 0, rule, noted({"a", "b"}))
    assert not any(r.excluded for r in records), "one attempt counted twice"
    records = node_exclusion.add_suspects(records, {"b", "c"}, 1, rule, noted({"b", "c"}))
    assert [r.name for r in records if r.excluded] == ["b"]
    records = node_exclusion.add_suspects(records, {"a"}, 2, rule, noted({"a"}))
    assert [r.name for r in records if r.excluded] == ["b"], "more than the limit"
    assert node_exclusion.select_avoided_nodes(records, rule) == (("b",), ("a",))


def test_so_many_nodes_stay_as_the_last_attempt_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_exclusion, "SUSPECT_ATTEMPTS", 1)
    rule = NodeExclusion()

    def excluded(accused: set[str], ran_on: set[str], *known: str) -> set[str]:
        before = [NodeRecord(name=name) for name in known]
        records = node_exclusion.add_suspects(before, accused, 0, rule, noted(ran_on, *before))
        hard, soft = node_exclusion.select_avoided_nodes(records, rule)
        assert {*hard, *soft} == accused, "one that is accused is not avoided at all"
        return {*hard}

    assert excluded({"a"}, {"a"}) == set(), "the only node"
    assert excluded({"a", "b"}, {"a", "b"}) == set(), "both nodes"
    assert excluded({"a", "b"}, {"a", "b", "c"}) == set(), "one pod per node would not fit"
    assert excluded({"a", "b"}, {"a", "b", "c"}, "d") == {"a"}
    assert excluded({"a", "b"}, {"a", "b", "c"}, "d", "e") == {"a", "b"}


def test_exclusion_can_be_off_and_is_bounded() -> None:
    off = NodeExclusion(enabled=False)
    records = node_exclusion.add_suspects(
        [NodeRecord(name="z", excluded=True)], {"a"}, 0, off, MANY
    )
    assert [r.name for r in records if r.excluded] == ["z"]
    assert node_exclusion.select_avoided_nodes(records, off) == ((), ()), (
        "what was excluded stays so"
    )
    many = node_exclusion.add_suspects(
        [NodeRecord(name="z", attempts=[0, 1], excluded=True)],
        {f"n{i}" for i in range(200)},
        0,
        NodeExclusion(),
        MANY,
    )
    assert len(many) == MAX_NODES_KEPT
    assert many[0].name == "z"
