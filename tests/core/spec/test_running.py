"""The smaller job that runs while replicas are missing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.running_subset import RunningSubset
from pipemorph.spec.sections.parallelism import Parallelism

ORDERS = (["pp", "dp_replicate", "tp"], ["dp_replicate", "pp", "tp"], ["tp", "pp", "dp_replicate"])


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "parallelism": {"stages": 2, "replicas": 3, "minReplicas": 1},
            "schedule": {"microbatches": 4},
            "trainer": {"module": "m", "iterations": 1},
            "failurePolicy": {"maxRestarts": 1},
        }
        | changes
    )


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_keep_all_coordinates_but_the_replica(order: list[str]) -> None:
    cut = Parallelism.model_validate(
        {"stages": 2, "replicas": 3, "tensor": 2, "order": order, "minReplicas": 1}
    )
    running = RunningSubset(cut, (1,))
    small = cut.model_copy(update={"replicas": 2}).mesh
    found = []
    for rank in range(cut.world_size):
        whole = cut.mesh.find_coordinate(rank)
        assert (
            running.runs_in_pod(rank) == (whole.replica != 1)
            and running.find_replicas_in_pod(rank)[0] == whole.replica
        )
        if whole.replica != 1:
            found.append(running.renumber_rank(rank))
            here = small.find_coordinate(found[-1])
            assert here.replica == (0, None, 1)[whole.replica]
            assert (here.stage, here.tensor) == (whole.stage, whole.tensor)
    assert found == list(range(small.world_size)), "in the same order"


@pytest.mark.parametrize(("each", "missing"), [(1, 2), (2, 0), (4, 1), (8, 2)])
def test_pods_are_whole(each: int, missing: int) -> None:
    """A replica is in several pods or in one, or two are in one."""
    cut = Parallelism.model_validate(
        {
            "stages": 4,
            "replicas": 4,
            "ranksPerPod": each,
            "minReplicas": 1,
            "order": ["dp_replicate", "pp"],
        }
    )
    lost = tuple(RunningSubset(cut).find_replicas_in_pod(missing))
    running = RunningSubset(cut, lost)
    for pod in range(cut.pods):
        ranks = range(pod * each, (pod + 1) * each)
        replicas = {cut.mesh.find_coordinate(rank).replica for rank in ranks}
        assert set(RunningSubset(cut).find_replicas_in_pod(pod)) == replicas
        assert running.runs_in_pod(pod) == (not replicas & set(lost))
        if running.runs_in_pod(pod):
            first = running.renumber_rank(ranks[0])
            assert [running.renumber_rank(rank) for rank in ranks] == list(
                range(first, first + each)
            )
            assert running.active_pods.index(pod) == first // each


def test_a_pod_may_not_have_parts_of_several_replicas() -> None:
    for order, each in product((["pp", "dp_replicate"],), (2, 4)):
        with pytest.raises(ValidationError, match="name dp_replicate first in parall"):
            Parallelism.model_validate(
                {"stages": 2, "replicas": 4, "ranksPerPod": each, "minReplicas": 1, "order": order}
            )
    with pytest.raises(ValidationError, match="minReplicas: is 5; expected at most the 4 replicas"):
        Parallelism.model_validate({"stages": 2, "replicas": 4, "minReplicas": 5})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"failurePolicy": {"hangSeconds": 60}}, "failurePolicy.maxRestarts: is 0, with parallel"),
        ({"recovery": {"neighbour": True}}, "recovery.neighbour: is true, with parallelism.minRep"),
        (
            {"adaptation": {"relayout": True}},
            "adaptation.relayout: is true, with parallelism.minReplicas",
        ),
        ({"recovery": {"snapshotIterations": 0}}, "recovery.snapshotIterations: is 0"),
    ],
)
def test_fields_that_do_not_go_with_it_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        spec(**changes)


def keeping(microbatches: int, **cut: Any) -> JobSpec:
    cut = {"stages": 2, "replicas": 3, "minReplicas": 2, "batch": "keep"} | cut
    schedule = {"microbatches": microbatches, "globalBatchSize": 6 * cut["replicas"] * microbatches}
    return spec(parallelism=cut, schedule=schedule)


def test_fewer_replicas_share_out_the_microbatches_of_all() -> None:
    whole = keeping(4)
    small = RunningSubset(whole.parallelism, (1,)).build_reduced_spec(whole)
    assert JobSpec.model_validate(small.model_dump(mode="json", by_alias=True)) == small
    assert (small.parallelism.replicas, small.schedule.microbatches) == (2, 6)
    assert small.schedule.global_batch_size == whole.schedule.global_batch_size == 72


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    why = "2 replicas cannot share 15 microbatches evenly, those of 3 × 5; use a multiple of 2 mic"
    with pytest.raises(ValidationError, match=why):
        keeping(5)
    with pytest.raises(ValidationError, match="use a multiple of 3 microbatches"):
        keeping(4, replicas=4)
    assert keeping(6, replicas=4).schedule.microbatches == 6
    with pytest.raises(ValidationError, match="each of 1 replicas would have 120000 microb"):
        keeping(60000, replicas=2, minReplicas=1, stages=10)
    with pytest.raises(ValidationError, match="batch: is keep, without minReplicas"):
        Parallelism.model_validate({"stages": 2, "replicas": 4, "batch": "keep"})


@pytest.mark.parametrize(("each", "ready"), [(1, {0, 1, 2, 4, 5}), (2, {0, 2})])
def test_replicas_run_whose_pods_are_ready(each: int, ready: set[int]) -> None:
    """Ranks 0 to 5 are in pods with one each, or with a whole replica."""
    cut = Parallelism.model_validate(
        {
            "stages": 2,
            "replicas": 3,
            "ranksPerPod": each,
            "minReplicas": 1,
            "order": ["dp_replicate", "pp"],
        }
    )
    whole = RunningSubset(cut)
    assert whole.with_ready_pods(range(cut.pods)) == whole
    assert whole.with_ready_pods(ready) == RunningSubset(cut, (1,))
    assert RunningSubset(cut, (1,)).with_ready_pods(range(cut.pods)) == whole, "all are back"


def test_replicas_of_the_smaller_job_equal_those_of_the_whole_one() -> None:
    faults = [
        {"link": 0, "replica": replica, "delayMs": 1.0 + replica, "fromIteration": 1}
        for replica in range(3)
    ]
    faults += [
        {"between": [0, 5], "delayMs": 7, "fromIteration": 1},
        {"between": [0, 4], "delayMs": 8, "fromIteration": 1},
    ]
    whole = spec(schedule={"microbatches": 4, "globalBatchSize": 24}, faults=faults)
    assert RunningSubset(whole.parallelism).build_reduced_spec(whole) is whole
    small = RunningSubset(whole.parallelism, (0,)).build_reduced_spec(whole)
    # The spec is valid by itself.
    again = JobSpec.model_validate(small.model_dump(mode="json", by_alias=True))
    assert again == small
    assert (small.parallelism.replicas, small.schedule.global_batch_size) == (2, 16)
    assert [(each.replica, each.delay_ms) for each in small.faults] == [(0, 2.0), (1, 3.0)]
    # Pods 0 and 3 were those of replica 0.
    other = RunningSubset(whole.parallelism, (1,)).build_reduced_spec(whole)
    assert [each.between for each in other.faults if each.between] == [[0, 3]]
