"""State that ranks resume from after they have departed for another layout: no processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipemorph_trainer.checkpoint.memory.copy_slots import CopySlots
from pipemorph_trainer.checkpoint.memory.neighbour_copies import NeighbourCopies
from pipemorph_trainer.checkpoint.memory.resume_agreement import ResumeAgreement
from pipemorph_trainer.checkpoint.memory.source_choice import CopyOffer, SourceChoice
from pipemorph_trainer.checkpoint.memory.state_copy import TensorEntry
from pipemorph_trainer.errors import PipelineError

FORM = (TensorEntry("weight", "float32", (3,)),)


def agree(
    folder: Path,
    *,
    stored_by: dict[int, int],
    places: tuple[int, int] = (0, 1),
    split: tuple[list[int], list[int]] = ([4, 2], [4, 2]),
) -> ResumeAgreement:
    """Rank 0 of two replicas, after generation 0. ``stored_by``: by place, the rank that
    stored a copy there; ``places``: by rank, where it runs now; ``split``: before and now."""
    world: Any = SimpleNamespace()
    ranks, states = [], []
    for rank, place in enumerate(places):
        mine = folder / f"rank-{place}.generation-1"
        mine.mkdir()
        slots = CopySlots(mine)
        if place in stored_by:
            slot = slots.begin_slot(FORM, 10)
            slot.copy.write_tensors({"weight": torch.zeros(3)})
            slots.finish_slot(
                slot, CopyOffer(9), {"split": split[0], "rank": stored_by[place], "sealed_by": 0}
            )
        world.coordinate = SimpleNamespace(rank=rank)
        ranks.append(
            ResumeAgreement(
                folder, slots, NeighbourCopies(mine), None, world=world, wait=None,  # type: ignore[arg-type]
                part={"split": split[1], "rank": rank}, state_keys=["stage 0"] * 2, generation=1,
                place=place,
            )
        )  # fmt: skip
        states.append(ranks[-1]._take_inventory(0, ""))
    world.coordinate = SimpleNamespace(rank=0)
    world.gather_all = lambda *_: states
    return ranks[0]


def test_a_pod_that_is_lost_as_ranks_leave_gets_its_state_from_a_replica(tmp_path: Path) -> None:
    """The layout has stayed as it was."""
    found = agree(tmp_path, stored_by={0: 0}).agree_on_sources(0, "")
    assert isinstance(found, SourceChoice) and (found.iteration, found.sources) == (9, (0, 0))


def test_ranks_that_exchange_places_get_their_own_copies_from_there(tmp_path: Path) -> None:
    rank = agree(tmp_path, stored_by={0: 0, 1: 1}, places=(1, 0))
    found = rank.agree_on_sources(0, "")
    assert isinstance(found, SourceChoice) and found.all_local and rank.moved
    assert rank._at == [(1, 0), (0, 1)], "by rank, the rank whose place that is now, and the place"


@pytest.mark.parametrize(
    "how",
    [
        {"stored_by": {0: 0}, "split": ([4, 2], [3, 3])},
        {"stored_by": {0: 0}, "places": (1, 0)},
        {"stored_by": {1: 1}, "places": (1, 0)},
    ],
)
def test_ranks_with_another_layout_need_their_own_copies(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    with pytest.raises(PipelineError, match="ranks do not have their copies in their new layout"):
        agree(tmp_path, **how).agree_on_sources(0, "")
