"""Copies in shared memory: whole or not, private, and never more than there is room for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from gate import same_bits

from pipemorph_trainer.state.kept import copies
from pipemorph_trainer.state.kept.choice import Offer
from pipemorph_trainer.state.kept.copies import Copy, Entry
from pipemorph_trainer.state.kept.exchange import Head
from pipemorph_trainer.state.kept.held import HeldCopies
from pipemorph_trainer.state.kept.slots import Slots

FORM = (
    Entry("weight", "float32", (3, 2)),
    Entry("empty", "float32", (0, 4)),
    Entry("half", "bfloat16", (5,), parted=True),
    Entry("flag", "bool", ()),
)
VALUES = {
    "weight": torch.arange(6.0).view(2, 3).t(),
    "empty": torch.empty(0, 4),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "flag": torch.tensor(True),
}


def write(path: Path) -> Copy:
    copy = Copy.create(path, FORM, 10)
    copy.begin()
    copy.write(VALUES)
    copy.write_object(b"the rest")
    copy.finish({"offer": [3]})
    return copy


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    write(path)
    found = Copy.open(path)
    assert found is not None and found.whole and found.form == FORM
    assert found.mark == {"offer": [3]} and found.object == b"the rest"
    for name, value in VALUES.items():
        same_bits(found.tensors[name], value.contiguous(), name)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_process_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    write(path)
    child = os.fork()
    if not child:
        copy = Copy.open(path)
        copy.begin()
        copy.tensors["weight"].zero_()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    found = Copy.open(path)
    assert found is not None and not found.whole


def test_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    assert Copy.open(path) is None
    path.write_bytes(b"something else")
    assert Copy.open(path) is None
    path.write_bytes(bytes(5000))
    assert Copy.open(path) is None
    # Unfinished: not all of its memory is there.
    write(path)
    os.truncate(path, path.stat().st_size - 1)
    assert Copy.open(path) is None


BIG = Entry("big", "float32", (5000,))


@pytest.mark.parametrize("where", ["form", "mark", "object", "weight", "big", "last", "swapped"])
def test_a_copy_with_other_bytes_is_none(where: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    copy = Copy.create(path, (*FORM, BIG), 10)
    copy.begin()
    copy.write(VALUES | {"big": torch.arange(5000.0)})
    copy.write_object(b"the rest")
    copy.finish({"offer": [3]})
    assert not copy.damaged, "nothing to compare with yet"
    copy.add_checksum()
    found = Copy.open(path)
    assert found is not None and found.whole and not found.damaged
    big = copy.tensors["big"]
    if where == "swapped":
        first = big[:1024].clone()
        big[:1024], big[1024:2048] = big[1024:2048], first
    elif where == "form":
        copy._memory[4096] ^= 1
    elif where == "mark":
        copy._memory[copies._HEAD.size] ^= 1
    elif where == "object":
        copy._memory[copy._object_at] ^= 1
    else:
        spoilt = copy.tensors["weight"] if where == "weight" else big
        spoilt.view(-1)[-1 if where == "last" else 0] += 1
    assert Slots(tmp_path).find(lambda mark: True) == []
    again = Copy.open(path)
    assert again is None or not again.whole or again.damaged


@pytest.mark.parametrize(("group", "room"), [(4097, 4097), (-5, 0)])
def test_room_is_not_more_than_that_of_the_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, room: int
) -> None:
    monkeypatch.setattr(copies, "memory_room", lambda: group)
    assert copies.room(tmp_path / "copy") == room


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "room", lambda folder: 140_031)
    with pytest.raises(OSError, match="takes 70,016 bytes, more than half of the 140,031 bytes"):
        write(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_neighbour_holds_copies_of_one_iteration_before_and_after_layers_moved(
    tmp_path: Path,
) -> None:
    """Those of before stay while the new parts are on trial, and go when newer ones come."""
    held, head = HeldCopies(tmp_path), Head([list(entry) for entry in FORM], 10, {}, 0)

    def receive(iteration: int, split: list[int], number: float) -> None:
        copy = held.room(2, head)
        copy.write(VALUES | {"weight": torch.full((3, 2), number)})
        copy.finish({"offer": list(Offer(iteration)), "split": split})
        held.received(2)

    def number(iteration: int, split: list[int]) -> float | None:
        copy = held.of(2, iteration, split)
        return None if copy is None else copy.tensors["weight"][0, 0].item()

    receive(10, [], 1.0)
    held.keep_only(10, [])
    receive(10, [4, 2], 2.0)
    assert (number(10, []), number(10, [4, 2])) == (1.0, 2.0)
    receive(13, [4, 2], 3.0)
    assert (number(10, []), number(10, [4, 2]), number(13, [4, 2])) == (None, 2.0, 3.0)
    receive(14, [], 4.0)
    receive(14, [4, 2], 5.0)
    held.keep_only(14, [])
    assert (number(14, []), number(14, [4, 2])) == (4.0, None)
    assert held.offers(lambda mark: True)[0] == {2: [Offer(14)]}
