"""What ranks go on with after they have left for another layout, or were to: no processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.state.kept.choice import Choice, Offer
from pipemorph_trainer.state.kept.copies import Entry
from pipemorph_trainer.state.kept.held import HeldCopies
from pipemorph_trainer.state.kept.resuming import Resuming
from pipemorph_trainer.state.kept.slots import Slots

FORM = (Entry("weight", "float32", (3,)),)


def agree(
    folder: Path, *, split: list[int], now: list[int], replaces: bool = False
) -> Choice | str:
    """What two replicas agree on after generation 0, of which the first has left with a copy of
    ``split`` and the second has lost its pod. ``now``: the split that they have."""
    world: Any = SimpleNamespace()
    ranks = []
    for rank in (0, 1):
        mine = folder / f"rank-{rank}.generation-1"
        mine.mkdir()
        slots = Slots(mine)
        if rank == 0:
            slot = slots.begin(FORM, 10)
            assert slot.copy is not None
            slot.copy.write({"weight": torch.zeros(3)})
            slots.finish(slot, Offer(9), {"split": split, "left": 0})
        world.coordinate = SimpleNamespace(rank=rank)
        ranks.append(
            Resuming(
                folder, slots, HeldCopies(mine), None, world=world, wait=None,  # type: ignore[arg-type]
                part={"split": now}, alike=["stage 0"] * 2, generation=1, replaces=replaces,
            )
        )  # fmt: skip
    world.coordinate = SimpleNamespace(rank=0)
    other = ranks[1]._told(0, "")
    world.tell_all = lambda mine, _: [mine, other]
    return ranks[0].agree(0, "")


def test_a_pod_that_is_lost_as_ranks_leave_gets_its_state_from_a_replica(tmp_path: Path) -> None:
    """The layers have stayed where they were."""
    found = agree(tmp_path, split=[4, 2], now=[4, 2])
    assert isinstance(found, Choice) and (found.iteration, found.sources) == (9, (0, 0))


@pytest.mark.parametrize(("now", "replaces"), [([3, 3], False), ([3, 3], True), ([4, 2], True)])
def test_ranks_with_another_layout_need_their_own_copies(
    tmp_path: Path, now: list[int], replaces: bool
) -> None:
    with pytest.raises(PipelineError, match="do not have their copies in their new layout"):
        agree(tmp_path, split=[4, 2], now=now, replaces=replaces)
