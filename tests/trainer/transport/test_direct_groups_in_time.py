"""Direct routes are made within a time, or the link and the rank that is missing are named."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import Ranks
from trainer_jobs import Job, Record, train

from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology.groups import ProcessGroups
from pipemorph_trainer.transport.channels import direct_groups
from pipemorph_trainer.transport.message import Direction

SHORT = 0.2
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MISSING = r"the direct route of link 0 to rank 1 was not there after 0\.2 s: that rank has not"


def make(rank: int, new: Any, device: torch.device = CPU, stages: int = 2) -> Any:
    groups: Any = SimpleNamespace(create_group=new)
    coordinate = MeshShape(stages).find_coordinate(rank)
    return direct_groups.make_direct_groups(coordinate, device, 300.0, groups, gpus=[None] * stages)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An event that a call which never returns waits for, until the test is over."""
    monkeypatch.setattr(direct_groups, "SETUP_SECONDS", SHORT)
    over = threading.Event()
    yield over
    over.set()


@pytest.mark.parametrize("at", ["the group", "the first group of two", "the first number"])
def test_a_rank_that_does_not_join_is_named(
    at: str, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes from torch's own calls, which have no such limit."""
    entered: list[str] = []
    device: Any = SimpleNamespace(enter_thread=lambda: entered.append(at))
    monkeypatch.setattr(direct_groups, "get_accelerator", lambda d: device if d == GPU else None)

    def connect(*_: Any, **__: Any) -> None:
        held.wait()

    monkeypatch.setattr(direct_groups, "create_communicators", connect)

    def new(ranks: list[int], **_: Any) -> Any:
        return object() if at == "the first number" else held.wait()

    began = time.monotonic()
    with pytest.raises(PipelineError, match=MISSING):
        make(0, new, CPU if at == "the group" else GPU)
    assert time.monotonic() - began < 10
    assert entered == ([] if at == "the group" else [at]), "its thread has the rank's device"


def test_a_failure_is_reported_with_its_link(held: threading.Event) -> None:
    def new(ranks: list[int], **_: Any) -> Any:
        raise RuntimeError("Connection closed by peer [10.0.0.2]:40001. And more")

    with pytest.raises(PipelineError, match=r"link 0 to rank 1 could not be made: Connection clos"):
        make(0, new)


def test_a_bug_is_not_reported_as_a_missing_rank(held: threading.Event) -> None:
    def new(ranks: list[int], **_: Any) -> Any:
        raise TypeError("new_group() got an unexpected keyword argument")

    with pytest.raises(TypeError, match="unexpected keyword"):
        make(0, new)


def test_links_do_not_wait_for_those_before_them(held: threading.Event) -> None:
    """Ranks make the groups in one order, in which every link is among the first two of its ranks
    with nothing before it but one other of them."""
    order: list[tuple[int, ...]] = []

    def new(ranks: list[int], **_: Any) -> Any:
        order.append(tuple(ranks))
        return object()

    found = make(2, new, stages=6)
    assert order == [(0, 1), (2, 3), (4, 5), (1, 2), (3, 4)]
    assert sorted(found) == [1, 2]
    assert list(found[1]) == list(Direction)


def gone_before_its_edges(context: TrainerContext, job: Job, gone: int) -> Record:
    """Train; a rank ends when it is to make its direct routes."""
    direct_groups.SETUP_SECONDS = 2.0
    make_group = ProcessGroups.create_group

    def new(self: Any, ranks: list[int] | None = None, **options: Any) -> Any:
        if context.rank == gone and options.get("group_desc", "").startswith("pipemorph link"):
            os._exit(9)
        return make_group(self, ranks, **options)

    ProcessGroups.create_group = new  # type: ignore[method-assign]
    return train(context, job)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_ends_meanwhile(gone: int) -> None:
    results = Ranks(2, gone_before_its_edges, Job(2, 4, iterations=1), gone).wait(60)
    assert results[gone].exitcode == 9
    said = results[1 - gone].error or ""
    assert f"the direct route of link 0 to rank {gone} " in said, said
