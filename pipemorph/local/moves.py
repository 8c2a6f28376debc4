"""Asks the ranks of a run to leave for another layout, sees what becomes of it, and tells of it in
``report.json``. When to ask, and which layout counts, is
:mod:`pipemorph.control.decide.layouts.moves`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipemorph.control.decide.layouts.moves import AFTER, BEFORE, SETTLES, Move, Moves, brought
from pipemorph.exits import PARTS_STAY
from pipemorph.local.processes.kept import KeptFolder
from pipemorph.wire import IterationSample


def ask(moves: Moves, move: Move, kept: KeptFolder, generation: int) -> None:
    """Have the ranks of a generation leave."""
    moves.ask(move)
    layers = moves.spec.parallelism.layers
    try:
        if move.of_layers and layers is not None:
            kept.ask_to_leave(generation, move.proposal.layout.spread(layers))
        else:
            kept.ask_to_leave(generation)
    except OSError as error:
        moves.stay(f"they cannot be told: {kept.root}: {error.strerror}")


def look(moves: Moves, kept: KeptFolder, generation: int) -> None:
    """See whether the ranks stay, or the new layout counts. Ranks with other parts say so when
    they have finished iterations: only then is it known that the parts can be trained."""
    if moves.leaving and (why := kept.stay(generation)) is not None:
        kept.stop_asking(generation)
        moves.stay(why)
    elif moves.settling:
        resumed = kept.resumed(generation)
        if resumed is not None and resumed.rung == "kept":
            moves.counts()
        elif (told := kept.stay(generation) or "").startswith(PARTS_STAY):
            moves.cannot(told)


def records(moves: Moves, iterations: Sequence[IterationSample]) -> list[dict[str, Any]]:
    """For ``report.json``, after the last iteration."""
    if moves.asked is not None:
        moves.asked.outcome, moves.asked.why = "stayed", "the run ended before"
    ends = [move.iteration for move in moves.made[1:]]
    return [
        record(move, iterations, end, moves.spec.parallelism.layers)
        for move, end in zip(moves.made, [*ends, None], strict=False)
    ]


def record(
    move: Move, iterations: Sequence[IterationSample], end: int | None, layers: int | None
) -> dict[str, Any]:
    """One change. ``end``: the iteration of the next one; ``layers``: of the model."""
    at, asked = move.iteration, move.proposal
    was: list[float] = []
    now: list[float] = []
    if at is not None:
        was = [s.seconds for s in iterations if at - BEFORE <= s.index < at]
        last = min(at + SETTLES + AFTER, at + SETTLES + AFTER if end is None else end)
        now = [s.seconds for s in iterations if at + SETTLES <= s.index < last]
    return {
        "reason": move.reason,
        "outcome": move.outcome,
        "why": move.why or None,
        "generation": move.generation,
        "iteration": at,
        "places": list(asked.layout.places),
        "moved": list(move.before.moved(asked.layout)),
        "layers": None if layers is None else list(asked.layout.spread(layers)),
        "layers_before": None if layers is None else list(move.before.spread(layers)),
        "predicted_seconds_before": asked.before,
        "predicted_seconds_after": asked.after,
        "promised": asked.promised,
        "measured": brought(was, now),
        "expected_cost_seconds": asked.cost,
        "seconds": move.seconds,
    }
