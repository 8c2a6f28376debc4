"""Ranks and coordinates: one function there and back, for every order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from pipemorph.errors import InputError
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.mesh import (
    COLUMN_DIMENSIONS,
    DATA_DIMENSIONS,
    DIMENSIONS,
    LOCKSTEP_DIMENSIONS,
    MeshShape,
)


def job(parallelism: dict[str, Any], **more: Any) -> PipeMorphJob:
    spec = {
        "parallelism": parallelism,
        "schedule": {"microbatches": 4, **more.pop("schedule", {})},
        "trainer": {"module": "train", "iterations": 1},
        **more,
    }
    return PipeMorphJob.model_validate(
        {
            "apiVersion": "pipemorph.io/v1alpha1",
            "kind": "PipeMorphJob",
            "metadata": {"name": "j"},
            "spec": spec,
        }
    )


@pytest.mark.parametrize("order", list(itertools.permutations(DIMENSIONS)))
def test_every_rank_has_one_place(order: tuple[Any, ...]) -> None:
    shape = MeshShape(3, 2, 2, 1, 2, order)
    assert shape.world_size == 24
    seen = set()
    for rank in range(shape.world_size):
        at = shape.find_coordinate(rank)
        seen.add((at.stage, at.replica, at.shard, at.context, at.tensor))
        assert shape.find_rank(at.stage, at.column) == rank
        assert at.is_first == (at.stage == 0) and at.is_last == (at.stage == 2)
        # Ranks along the innermost dimension have consecutive numbers.
        name = next(n for n in reversed(order) if shape.sizes[n] > 1)
        if at.index_along(name) + 1 < shape.sizes[name]:
            assert shape.find_coordinate(rank + 1).index_along(name) == at.index_along(name) + 1
        first = shape.find_coordinate(at.find_first_along(DATA_DIMENSIONS))
        assert (first.stage, first.tensor) == (at.stage, at.tensor)
        assert (first.replica, first.shard, first.context) == (0, 0, 0)
        # Ranks with the same samples, and how the parts of a batch are numbered.
        assert (at.dp_rank, at.dp_size) == (
            at.replica * shape.shard + at.shard,
            shape.replicas * shape.shard,
        )
        assert shape.find_coordinate(at.find_first_along(("pp", "cp", "tp"))).dp_rank == at.dp_rank
    assert len(seen) == shape.world_size
    for names in (("pp",), COLUMN_DIMENSIONS, DATA_DIMENSIONS, LOCKSTEP_DIMENSIONS):
        groups = shape.group_ranks(names)
        assert sorted(itertools.chain(*groups)) == list(range(shape.world_size))
        for group in groups:
            others = {
                tuple(shape.find_coordinate(r).index_along(n) for n in DIMENSIONS if n not in names)
                for r in group
            }
            assert len(others) == 1, "ranks of a group share the other coordinates"


def test_the_numbering_of_replicas_alone() -> None:
    outside = MeshShape(4, 2, order=("dp_replicate", "pp"))
    assert [outside.find_rank(1, replica) for replica in (0, 1)] == [1, 5]
    by_default = MeshShape(4, 2)
    assert [by_default.find_rank(1, replica) for replica in (0, 1)] == [2, 3]
    assert by_default.find_coordinate(5).column == by_default.find_coordinate(5).replica == 1
    with pytest.raises(InputError, match=r"rank is 8; the mesh has 8 ranks \(4 stages × 2 repl"):
        by_default.find_coordinate(8)


def test_places_are_named_without_what_is_alone() -> None:
    assert str(MeshShape(2).find_coordinate(1)) == "rank 1 (stage 1)"
    assert str(MeshShape(2, 2).find_coordinate(1)) == "rank 1 (stage 0, replica 1)"
    shape = MeshShape(2, 2, tensor=2)
    assert str(shape.find_coordinate(5)) == "rank 5 (stage 1, replica 0, tensor 1)"
    assert [shape.format_column_name(c) for c in (0, 3)] == [
        "replica 0, tensor 0", "replica 1, tensor 1",
    ]  # fmt: skip
    assert MeshShape(4).format_column_name(0) == ""
    assert shape.describe_order() == (
        "2 stages × 2 replicas × 2 tensor in the order pp, dp_replicate, tp"
    )


def test_the_spec_gives_the_mesh() -> None:
    cut = {"stages": 2, "replicas": 2, "tensor": 2, "order": ["dp_replicate", "pp", "tp"]}
    mesh = job(cut).spec.parallelism.mesh
    assert mesh == MeshShape(2, 2, tensor=2, order=("dp_replicate", "pp", "tp"))
    assert (mesh.world_size, mesh.columns, mesh.lockstep_size) == (8, 4, 2)
    assert job({"stages": 2}).spec.parallelism.mesh == MeshShape(2)


@pytest.mark.parametrize(
    ("parallelism", "more", "expected"),
    [
        ({"tensor": 2, "order": ["pp"]}, {}, "order: is pp, without tp, which has 2 ranks"),
        ({"order": ["pp", "tp", "pp"]}, {}, "order: is pp, tp, pp; expected every dimension once"),
        ({"order": ["pp", "dp"]}, {}, "Input should be 'pp', 'dp_replicate'"),
        ({"tensor": 1024, "shard": 1024}, {}, "at most 100000"),
        (
            {"shard": 2},
            {"schedule": {"dispatch": "guided"}},
            "schedule.dispatch: is guided; ranks of one stage that run collectives inside ops",
        ),
        (
            {"shard": 2},
            {"schedule": {"globalBatchSize": 12}},
            "is 12, which 1 replicas × 2 shards × 4 microbatches do not divide; use a mul",
        ),
        (
            {"tensor": 2},
            {"faults": [{"link": 0, "replica": 2, "delayMs": 1}]},
            "faults[0].replica: is 2; the job has 2 columns",
        ),
    ],
)
def test_impossible_values_are_refused(
    parallelism: dict[str, Any], more: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        job({"stages": 2, **parallelism}, **more)
    assert expected in str(refused.value)
