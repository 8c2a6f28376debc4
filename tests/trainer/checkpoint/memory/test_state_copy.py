"""Copies in shared memory: whole or not, private, and never more than there is room for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from gate import same_bits

from pipemorph_trainer.checkpoint.memory import state_copy
from pipemorph_trainer.checkpoint.memory.copy_slots import CopySlots
from pipemorph_trainer.checkpoint.memory.copy_transfer import CopyHeader
from pipemorph_trainer.checkpoint.memory.neighbour_copies import NeighbourCopies
from pipemorph_trainer.checkpoint.memory.source_choice import CopyOffer
from pipemorph_trainer.checkpoint.memory.state_copy import StateCopy, TensorEntry

FORM = (
    TensorEntry("weight", "float32", (3, 2)),
    TensorEntry("empty", "float32", (0, 4)),
    TensorEntry("half", "bfloat16", (5,), is_shard=True),
    TensorEntry("flag", "bool", ()),
)
VALUES = {
    "weight": torch.arange(6.0).view(2, 3).t(),
    "empty": torch.empty(0, 4),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "flag": torch.tensor(True),
}


def write(path: Path) -> StateCopy:
    copy = StateCopy.create(path, FORM, 10)
    copy.begin_write()
    copy.write_tensors(VALUES)
    copy.write_object(b"the rest")
    copy.finish_write({"offer": [3]})
    return copy


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    write(path)
    found = StateCopy.open(path)
    assert found is not None and found.whole and found.form == FORM
    assert found.mark == {"offer": [3]} and found.pickled_object == b"the rest"
    for name, value in VALUES.items():
        same_bits(found.tensors[name], value.contiguous(), name)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_process_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    write(path)
    child = os.fork()
    if not child:
        copy = StateCopy.open(path)
        copy.begin_write()
        copy.tensors["weight"].zero_()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    found = StateCopy.open(path)
    assert found is not None and not found.whole


def test_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    assert StateCopy.open(path) is None
    path.write_bytes(b"something else")
    assert StateCopy.open(path) is None
    path.write_bytes(bytes(5000))
    assert StateCopy.open(path) is None
    # Unfinished: not all of its memory is there.
    write(path)
    os.truncate(path, path.stat().st_size - 1)
    assert StateCopy.open(path) is None


BIG = TensorEntry("big", "float32", (5000,))


@pytest.mark.parametrize("where", ["form", "mark", "object", "weight", "big", "last", "swapped"])
def test_a_copy_with_other_bytes_is_none(where: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    copy = StateCopy.create(path, (*FORM, BIG), 10)
    copy.begin_write()
    copy.write_tensors(VALUES | {"big": torch.arange(5000.0)})
    copy.write_object(b"the rest")
    copy.finish_write({"offer": [3]})
    assert not copy.damaged, "nothing to compare with yet"
    copy.add_checksum()
    found = StateCopy.open(path)
    assert found is not None and found.whole and not found.damaged
    big = copy.tensors["big"]
    if where == "swapped":
        first = big[:1024].clone()
        big[:1024], big[1024:2048] = big[1024:2048], first
    elif where == "form":
        copy._memory[4096] ^= 1
    elif where == "mark":
        copy._memory[state_copy._HEAD.size] ^= 1
    elif where == "object":
        copy._memory[copy._object_at] ^= 1
    else:
        spoilt = copy.tensors["weight"] if where == "weight" else big
        spoilt.view(-1)[-1 if where == "last" else 0] += 1
    assert CopySlots(tmp_path).adopt_copies(lambda mark: True) == []
    again = StateCopy.open(path)
    assert again is None or not again.whole or again.damaged


@pytest.mark.parametrize(("group", "room"), [(4097, 4097), (-5, 0)])
def test_room_is_not_more_than_that_of_the_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, room: int
) -> None:
    monkeypatch.setattr(state_copy, "read_memory_headroom", lambda: group)
    assert state_copy.find_available_bytes(tmp_path / "copy") == room


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copy, "find_available_bytes", lambda folder: 140_031)
    with pytest.raises(OSError, match="takes 70,016 bytes, more than half of the 140,031 bytes"):
        write(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_neighbour_holds_copies_of_one_iteration_before_and_after_layers_moved(
    tmp_path: Path,
) -> None:
    """Copies of before stay while the new parts are on trial, and go when newer ones come."""
    held, head = NeighbourCopies(tmp_path), CopyHeader([list(entry) for entry in FORM], 10, {}, 0)

    def receive(iteration: int, split: list[int], number: float) -> None:
        copy = held.begin_receive(2, head)
        copy.write_tensors(VALUES | {"weight": torch.full((3, 2), number)})
        copy.finish_write({"offer": list(CopyOffer(iteration)), "split": split})
        held.finish_receive(2)

    def number(iteration: int, split: list[int]) -> float | None:
        copy = held.find_copy(2, iteration, split)
        return None if copy is None else copy.tensors["weight"][0, 0].item()

    receive(10, [], 1.0)
    held.remove_other_iterations(10, [])
    receive(10, [4, 2], 2.0)
    assert (number(10, []), number(10, [4, 2])) == (1.0, 2.0)
    receive(13, [4, 2], 3.0)
    assert (number(10, []), number(10, [4, 2]), number(13, [4, 2])) == (None, 2.0, 3.0)
    receive(14, [], 4.0)
    receive(14, [4, 2], 5.0)
    held.remove_other_iterations(14, [])
    assert (number(14, []), number(14, [4, 2])) == (4.0, None)
    assert held.list_offers(lambda mark: True)[0] == {2: [CopyOffer(14)]}
