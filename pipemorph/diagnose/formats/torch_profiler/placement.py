"""Place of each rank in pipeline, data and tensor dimension, by the process groups in its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipemorph.diagnose.formats.torch_profiler.rank_trace import RankTrace
from pipemorph.errors import InputError

PIPELINE_GROUPS = ("mesh_pp", "PIPELINE_MODEL_PARALLEL_GROUP")
TENSOR_GROUPS = (
    "mesh_tp", "mesh_cp", "TENSOR_MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP",
)  # fmt: skip


class RankPlace(NamedTuple):
    """Place of a rank. ``ranks``: global ranks of its pipeline, by stage. ``position``: its own
    among them."""

    ranks: tuple[int, ...]
    position: int
    dp_rank: int


def place_ranks(traces: Sequence[RankTrace], notes: list[str]) -> dict[int, RankPlace]:
    """Places of the ranks of all complete pipelines. Ranks of other tensor or context ranks than 0
    and incomplete pipelines are omitted, with a note. Raises :class:`InputError` if no pipeline
    is complete."""
    diagnosed = {}
    others = []
    for trace in traces:
        if any(
            group.description in TENSOR_GROUPS and group.ranks.index(trace.rank) > 0
            for group in trace.groups
            if trace.rank in group.ranks
        ):
            others.append(trace.rank)
        else:
            diagnosed[trace.rank] = trace
    if others:
        notes.append(
            f"Ranks {list_numbers(others)} are not diagnosed: of each tensor or context group only "
            "rank 0 is."
        )
    if not diagnosed:
        raise InputError(
            f"{traces[0].name}: is of tensor rank 1 or higher, as all traces given; "
            "give those of tensor rank 0"
        )
    pipelines = sorted({_find_pipeline(trace) for trace in diagnosed.values()})
    places: dict[int, RankPlace] = {}
    missing: set[int] = set()
    for dp_rank, ranks in enumerate(pipelines):
        lacking = [rank for rank in ranks if rank not in diagnosed]
        missing.update(lacking)
        if not lacking:
            places.update(
                (rank, RankPlace(ranks, position, dp_rank)) for position, rank in enumerate(ranks)
            )
    if missing:
        listed = list_numbers(sorted(missing))
        if not places:
            raise InputError(
                f"{traces[0].name}: is of a pipeline of ranks {list_numbers(pipelines[0])}; traces "
                f"of ranks {listed} are missing; give one of each rank"
            )
        notes.append(f"Traces of ranks {listed} are missing, so their pipelines are not diagnosed.")
    if len(next(iter(places.values())).ranks) < 2:
        raise InputError(f"{traces[0].name}: is of a pipeline of one rank; expected several")
    return places


def _find_pipeline(trace: RankTrace) -> tuple[int, ...]:
    """Global ranks of a rank's pipeline. Without a group by a name that says so, all ranks."""
    for group in trace.groups:
        if group.description in PIPELINE_GROUPS and trace.rank in group.ranks:
            return group.ranks
    return tuple(range(trace.world_size))


def list_numbers(numbers: Sequence[int], most: int = 8) -> str:
    """Numbers for a message, at most ``most`` of them."""
    listed = ", ".join(map(str, numbers[:most]))
    return f"{listed} and {len(numbers) - most} more" if len(numbers) > most else listed
