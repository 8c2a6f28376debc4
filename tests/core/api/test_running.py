"""The smaller job that runs while replicas are missing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from pipemorph.api.running import Running
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.spec import JobSpec

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
    running = Running(cut, (1,))
    small = cut.model_copy(update={"replicas": 2}).mesh
    found = []
    for rank in range(cut.world_size):
        whole = cut.mesh.coordinate(rank)
        assert (
            running.has(rank) == (whole.replica != 1) and running.of_pod(rank)[0] == whole.replica
        )
        if whole.replica != 1:
            found.append(running.rank(rank))
            here = small.coordinate(found[-1])
            assert here.replica == (0, None, 1)[whole.replica]
            assert (here.stage, here.tensor) == (whole.stage, whole.tensor)
    assert found == list(range(small.world_size)), "in the same order"


@pytest.mark.parametrize(("each", "missing"), [(1, 2), (2, 0), (4, 1), (8, 2)])
def test_pods_are_whole(each: int, missing: int) -> None:
    """One replica in several pods, in one, and two in one."""
    cut = Parallelism.model_validate(
        {
            "stages": 4,
            "replicas": 4,
            "ranksPerPod": each,
            "minReplicas": 1,
            "order": ["dp_replicate", "pp"],
        }
    )
    lost = tuple(Running(cut).of_pod(missing))
    running = Running(cut, lost)
    for pod in range(cut.pods):
        ranks = range(pod * each, (pod + 1) * each)
        replicas = {cut.mesh.coordinate(rank).replica for rank in ranks}
        assert set(Running(cut).of_pod(pod)) == replicas
        assert running.has(pod) == (not replicas & set(lost))
        if running.has(pod):
            first = running.rank(ranks[0])
            assert [running.rank(rank) for rank in ranks] == list(range(first, first + each))
            assert running.pods.index(pod) == first // each


def test_a_pod_may_not_have_parts_of_several_replicas() -> None:
    for order, each in product((["pp", "dp_replicate"],), (2, 4)):
        with pytest.raises(ValidationError, match="name dp_replicate first in parall"):
            Parallelism.model_validate(
                {"stages": 2, "replicas": 4, "ranksPerPod": each, "minReplicas": 1, "order": order}
            )
    with pytest.raises(ValidationError, match="minReplicas: is 5; there are 4 replicas"):
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
    small = Running(whole.parallelism, (1,)).spec(whole)
    assert JobSpec.model_validate(small.model_dump(mode="json", by_alias=True)) == small
    assert (small.parallelism.replicas, small.schedule.microbatches) == (2, 6)
    assert small.schedule.global_batch_size == whole.schedule.global_batch_size == 72


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    why = "2 replicas cannot share out 15 microbatches, those of 3 × 5; use a multiple of 2 micro"
    with pytest.raises(ValidationError, match=why):
        keeping(5)
    with pytest.raises(ValidationError, match="use a multiple of 3 microbatches"):
        keeping(4, replicas=4)
    assert keeping(6, replicas=4).schedule.microbatches == 6
    with pytest.raises(ValidationError, match="of 1 replicas each would have 120000 microb"):
        keeping(60000, replicas=2, minReplicas=1, stages=10)
    with pytest.raises(ValidationError, match="batch: is keep, without minReplicas"):
        Parallelism.model_validate({"stages": 2, "replicas": 4, "batch": "keep"})


@pytest.mark.parametrize(("each", "ready"), [(1, {0, 1, 2, 4, 5}), (2, {0, 2})])
def test_replicas_run_whose_pods_are_ready(each: int, ready: set[int]) -> None:
    """Six ranks: pods with one each, or with a whole replica."""
    cut = Parallelism.model_validate(
        {
            "stages": 2,
            "replicas": 3,
            "ranksPerPod": each,
            "minReplicas": 1,
            "order": ["dp_replicate", "pp"],
        }
    )
    whole = Running(cut)
    assert whole.in_pods(range(cut.pods)) == whole
    assert whole.in_pods(ready) == Running(cut, (1,))
    assert Running(cut, (1,)).in_pods(range(cut.pods)) == whole, "all are back"


def test_the_smaller_job_has_what_each_replica_has_in_the_whole_one() -> None:
    faults = [
        {"link": 0, "replica": replica, "delayMs": 1.0 + replica, "fromIteration": 1}
        for replica in range(3)
    ]
    faults += [
        {"between": [0, 5], "delayMs": 7, "fromIteration": 1},
        {"between": [0, 4], "delayMs": 8, "fromIteration": 1},
    ]
    whole = spec(schedule={"microbatches": 4, "globalBatchSize": 24}, faults=faults)
    assert Running(whole.parallelism).spec(whole) is whole
    small = Running(whole.parallelism, (0,)).spec(whole)
    # It is a good one by itself.
    again = JobSpec.model_validate(small.model_dump(mode="json", by_alias=True))
    assert again == small
    assert (small.parallelism.replicas, small.schedule.global_batch_size) == (2, 16)
    assert [(each.replica, each.delay_ms) for each in small.faults] == [(0, 2.0), (1, 3.0)]
    # Pods 0 and 3 were those of replica 0.
    other = Running(whole.parallelism, (1,)).spec(whole)
    assert [each.between for each in other.faults if each.between] == [[0, 3]]
