"""A pod whose memory is lost goes on from the copies that the next pod holds, to the bit."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ranks, run_ranks
from test_checkpointer import Case, compare, train

from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.checkpoint.memory import neighbour
from pipemorph_trainer.checkpoint.memory.copy_slots import CopySlot, CopySlots
from pipemorph_trainer.checkpoint.memory.copy_transfer import (
    receive_body,
    receive_header,
    send_body,
    send_header,
)
from pipemorph_trainer.checkpoint.memory.neighbour import PodRing
from pipemorph_trainer.checkpoint.memory.source_choice import (
    CopyOffer,
    SourceChoice,
    choose_sources,
)
from pipemorph_trainer.checkpoint.memory.state_copy import StateCopy, TensorEntry

ALONE = Case({"pp": 4}, every=2, neighbour=True)


def test_the_ring() -> None:
    ring = PodRing(["a", "a", "b", "b", "c", "c"])
    assert ring.pods == 3
    assert [ring.find_target(rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [ring.find_sources(rank) for rank in range(6)] == [[4], [5], [0], [1], [2], [3]]
    # Somebody receives first in every ring, so that they do not all wait to send.
    assert [ring.sends_first(rank) for rank in (0, 2, 4)] == [True, False, True]
    uneven = PodRing(["a", "b", "b", "b"])
    assert [uneven.find_target(rank) for rank in range(4)] == [1, 0, 0, 0]
    assert [uneven.find_sources(rank) for rank in range(4)] == [[1, 2, 3], [0], [], []]


FORM = (TensorEntry("weight", "float32", (3,)),)


def put(slots: CopySlots, iteration: int) -> CopySlot:
    slot = slots.begin_slot(FORM, 10)
    slot.copy.write_tensors({"weight": torch.full((3,), float(iteration))})
    slots.finish_slot(slot, CopyOffer(iteration), {})
    return slot


def held_iterations(folder: Path) -> dict[str, int]:
    """The whole copies in a folder: the iteration of each file."""
    found = {}
    for path in sorted(folder.iterdir()):
        copy = StateCopy.open(path)
        if copy.whole:
            found[path.name] = CopyOffer(*copy.mark["offer"]).iteration
            assert copy.tensors["weight"].tolist() == [found[path.name]] * 3
    return found


def test_two_files_are_enough_while_no_rank_reads(tmp_path: Path) -> None:
    slots = CopySlots(tmp_path)
    for iteration in range(5):
        put(slots, iteration)
    assert held_iterations(tmp_path) == {"a": 4, "b": 3}


def test_what_is_pinned_stays(tmp_path: Path) -> None:
    slots = CopySlots(tmp_path)
    put(slots, 0)
    (safe,) = slots.pin_newest()
    for iteration in range(1, 7):
        put(slots, iteration)
        assert slots.find_newest(iteration - 1) is not None, (
            "the one before stays while one is written"
        )
    assert held_iterations(tmp_path) == {"a": 0, "b": 5, "c": 6}
    slots.unpin_slot(safe)
    put(slots, 7)
    assert held_iterations(tmp_path) == {"a": 7, "b": 5, "c": 6}


def test_while_copies_are_written_late_two_more_stay(tmp_path: Path) -> None:
    slots = CopySlots(tmp_path, whole=2)
    for iteration in range(5):
        put(slots, iteration)
    slots.begin_slot(FORM, 10)
    assert sorted(held_iterations(tmp_path).values()) == [3, 4]


def test_its_own_copy_from_a_neighbour() -> None:
    own = [[CopyOffer(4), CopyOffer(5)], [], [CopyOffer(4), CopyOffer(5)]]
    held: list[dict[int, list[CopyOffer]]] = [
        {2: [CopyOffer(4)]},
        {},
        {1: [CopyOffer(3), CopyOffer(4)]},
    ]
    found = choose_sources(own, (0, 1, 2), held)
    why = "no rank has the state of rank 1 before iteration 5"
    assert found == SourceChoice(4, (0, 2, 2), why, frozenset({1}))
    assert found.has_own_state(1) and not found.all_local
    assert choose_sources(own, (0, 1, 2), [{}, {}, {1: [CopyOffer(3)]}]) == why


def test_a_replica_goes_before_a_neighbour() -> None:
    """The replica has begun the newest iteration."""
    own = [[CopyOffer(5)], [], [CopyOffer(5)], [CopyOffer(5)]]
    held: list[dict[int, list[CopyOffer]]] = [{1: [CopyOffer(5)]}, {}, {}, {}]
    found = choose_sources(own, (0, 1, 0, 1), held)
    assert (
        isinstance(found, SourceChoice)
        and found.sources == (0, 3, 2, 3)
        and not found.has_own_state(1)
    )


@dataclass(frozen=True)
class Pods:
    """``per_pod``: ranks. ``stuck``: rank 1 never sends its copies from this iteration on."""

    per_pod: int = 1
    stuck: int | None = None


def sends_once(context: TrainerContext, folder: str) -> bool:
    """Rank 0 writes to a copy while it sends it, and then not. Rank 1: which came."""
    store = f"tcp://{context.master_addr}:{context.master_port}"
    dist.init_process_group("gloo", store, rank=context.rank, world_size=context.world_size)
    own = StateCopy.create(Path(folder) / str(context.rank), FORM, 10)
    own.begin_write()
    own.write_tensors({"weight": torch.full((3,), 7.0 * (1 - context.rank))})
    own.write_object(bytes(10))
    group, came = dist.group.WORLD, []
    assert group is not None
    own.finish_write({})
    for written in (1.0, 0.0):
        if context.rank == 0:
            send_header(own, 1, group)
            own.tensors["weight"][1] += written
            send_body(own, 1, group, lambda work: work.wait())
        else:
            head = receive_header(0, group)
            assert head is not None
            came.append(receive_body(own, head, 0, group, lambda work: work.wait()))
    dist.destroy_process_group()
    return came == [False, True] or context.rank == 0


def test_a_copy_that_may_have_been_written_while_it_was_sent_is_none(tmp_path: Path) -> None:
    assert run_ranks(2, sends_once, str(tmp_path)) == [True, True]


def in_pods(
    context: TrainerContext, case: Case, kill: dict[int, tuple[str, int]], pods: Pods
) -> dict[str, Any]:
    """Train, with a folder for every pod."""
    assert context.memory_dir is not None
    own = context.memory_dir / f"pod-{context.rank // pods.per_pod}"
    own.mkdir(exist_ok=True)
    sends = []
    step, send = Pipeline.step, neighbour.send_body

    def stepping(self: Pipeline, *args: Any, **options: Any) -> Any:
        keeper = self._parts.memory_checkpointer
        sends.append(keeper is not None and keeper.neighbour is not None)
        return step(self, *args, **options)

    def late(copy: StateCopy, *args: Any) -> None:
        offer = CopyOffer(*copy.mark["offer"])
        if pods.stuck is not None and context.rank == 1 and offer.iteration >= pods.stuck:
            threading.Event().wait(60)
        # Longer than an iteration.
        threading.Event().wait(0.3)
        send(copy, *args)

    Pipeline.step, neighbour.send_body = stepping, late  # type: ignore[method-assign]
    found = train(replace(context, memory_dir=own), case, kill)
    return {**found, "sends": any(sends)}


@cache
def undisturbed() -> list[Any]:
    return run_ranks(ALONE.ranks, train, ALONE, {})


def lose_pod(folder: Path, case: Case, pods: Pods, lost: int, moment: tuple[str, int]) -> None:
    """Train until all ranks of a pod are killed and its folder is gone."""
    of = range(lost * pods.per_pod, (lost + 1) * pods.per_pod)
    folder.mkdir()
    context = {"memory_dir": folder, "generation": 0}
    kill = dict.fromkeys(of, moment)
    ended = Ranks(case.ranks, in_pods, case, kill, pods, context=context).wait()
    killed = [each for each in ended if each.exitcode == -signal.SIGKILL]
    assert {each.rank for each in killed} & set(of), [each.error for each in ended]
    shutil.rmtree(folder / f"pod-{lost}")


def go_on(folder: Path, case: Case, pods: Pods) -> tuple[list[Any], dict[str, Any]]:
    """Run the next generation; return the results of its ranks, and its resume point."""
    context = {"memory_dir": folder, "generation": 1}
    found = run_ranks(case.ranks, in_pods, case, {}, Pods(pods.per_pod), context=context)
    word: dict[str, Any] = json.loads((folder / "pod-0/resumed.generation-1").read_text())
    return found, word


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("per_pod", "lost"), [(1, 1), pytest.param(2, 0, marks=pytest.mark.full)])
def test_a_lost_pod(per_pod: int, lost: int, tmp_path: Path) -> None:
    """Iterations are copied every second time, so one of seven finished ones runs again. Copies
    take longer than iterations: training waits for them."""
    folder, pods = tmp_path / "memory", Pods(per_pod)
    lose_pod(folder, ALONE, pods, lost, ("backward", 7))
    found, word = go_on(folder, ALONE, pods)
    assert (word["rung"], word["iteration"]) == ("neighbour", 6)
    assert word["why"].endswith("no copy of iteration 6"), word
    assert all(each["sends"] for each in found)
    compare(found, undisturbed(), 6)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_copies_stay_until_newer_ones_are_safe(tmp_path: Path) -> None:
    """The copy of rank 1 of iteration 4 is on its way for ever: all ranks hold theirs of 2."""
    folder, pods = tmp_path / "memory", Pods(stuck=4)
    lose_pod(folder, ALONE, pods, 1, ("backward", 4))
    found, word = go_on(folder, ALONE, pods)
    assert (word["rung"], word["iteration"]) == ("neighbour", 2)
    assert word["why"] == "no rank has the state of rank 1 before iteration 4"
    compare(found, undisturbed(), 2)
