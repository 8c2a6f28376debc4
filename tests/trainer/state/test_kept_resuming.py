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
    folder: Path,
    *,
    left: dict[int, int],
    places: tuple[int, int] = (0, 1),
    split: tuple[list[int], list[int]] = ([4, 2], [4, 2]),
) -> Resuming:
    """Rank 0 of two replicas, which can agree after generation 0. ``left``: by place, the rank that
    left a copy there; ``places``: by rank, where it runs now; ``split``: before and now."""
    world: Any = SimpleNamespace()
    ranks, told = [], []
    for rank, place in enumerate(places):
        mine = folder / f"rank-{place}.generation-1"
        mine.mkdir()
        slots = Slots(mine)
        if place in left:
            slot = slots.begin(FORM, 10)
            slot.copy.write({"weight": torch.zeros(3)})
            slots.finish(slot, Offer(9), {"split": split[0], "rank": left[place], "left": 0})
        world.coordinate = SimpleNamespace(rank=rank)
        ranks.append(
            Resuming(
                folder, slots, HeldCopies(mine), None, world=world, wait=None,  # type: ignore[arg-type]
                part={"split": split[1], "rank": rank}, alike=["stage 0"] * 2, generation=1,
                place=place,
            )
        )  # fmt: skip
        told.append(ranks[-1]._told(0, ""))
    world.coordinate = SimpleNamespace(rank=0)
    world.tell_all = lambda *_: told
    return ranks[0]


def test_a_pod_that_is_lost_as_ranks_leave_gets_its_state_from_a_replica(tmp_path: Path) -> None:
    """The layout has stayed as it was."""
    found = agree(tmp_path, left={0: 0}).agree(0, "")
    assert isinstance(found, Choice) and (found.iteration, found.sources) == (9, (0, 0))


def test_ranks_that_exchange_places_get_their_own_copies_from_there(tmp_path: Path) -> None:
    rank = agree(tmp_path, left={0: 0, 1: 1}, places=(1, 0))
    found = rank.agree(0, "")
    assert isinstance(found, Choice) and found.exact and rank.moved
    assert rank._at == [(1, 0), (0, 1)], "by rank, the rank whose place that is now, and the place"


@pytest.mark.parametrize(
    "how",
    [
        {"left": {0: 0}, "split": ([4, 2], [3, 3])},
        {"left": {0: 0}, "places": (1, 0)},
        {"left": {1: 1}, "places": (1, 0)},
    ],
)
def test_ranks_with_another_layout_need_their_own_copies(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    with pytest.raises(PipelineError, match="ranks do not have their copies in their new layout"):
        agree(tmp_path, **how).agree(0, "")
