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
        assert copy is not None
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
    held, head = HeldCopies(tmp_path), Head([list(entry) for entry in FORM], 10, {})

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
