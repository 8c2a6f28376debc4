"""Layers on trial: of what is in status of a job's generations, what changes as ranks take up other
layers, fail with them, or have trained with them. Pure.

Which layers are in force, and which a failure goes back to, is :attr:`Recoveries.layers` and
:attr:`Recoveries.layers_before`. Which were refused is there, too: another ingest must not try them
again.
"""

from __future__ import annotations

from pipemorph.api.status_recoveries import MAX_REFUSED_KEPT, Recoveries
from pipemorph.control.pods.splits import Split, Splits, split_of


def taken_up(saved: Recoveries, asked: Split) -> Recoveries:
    """As ranks leave: with layers that they were ``asked`` to leave for, they go on with these, on
    trial."""
    if not asked:
        return saved
    update = {"layers": list(split_of(asked)), "layers_before": list(saved.layers)}
    return saved.model_copy(update=update)


def gone_back(saved: Recoveries) -> Recoveries:
    """As ranks have failed: from layers on trial they go back."""
    if saved.layers_before is None:
        return saved
    update = {"layers": list(saved.layers_before), "layers_before": None}
    return saved.model_copy(update=update)


def refused(saved: Recoveries, split: Split) -> Recoveries:
    """As ranks have failed with these layers of all stages: they are not tried again."""
    known = [each for each in saved.layers_refused if each != list(split)]
    kept = [*known, list(split)][-MAX_REFUSED_KEPT:]
    return saved.model_copy(update={"layers_refused": kept})


def settled(saved: Recoveries) -> Recoveries:
    """As the layers count."""
    if saved.layers_before is None:
        return saved
    return saved.model_copy(update={"layers_before": None})


def brought(saved: Recoveries, generation: int, measured: float) -> Recoveries:
    """As it is known what the layers of a generation have saved, as part of an iteration."""
    which = saved.attempt, generation
    last = [
        each.model_copy(update={"measured": measured})
        if (each.attempt, each.generation) == which
        else each
        for each in saved.last
    ]
    return saved.model_copy(update={"last": last})


def began_at(saved: Recoveries, splits: Splits) -> int | None:
    """The first iteration with the layers that are on trial; None: none are, or it is not known
    here. Where another ingest has begun this generation, ranks that are gone have said so."""
    if saved.layers_before is None:
        return None
    for last in saved.last[-1:]:
        if (last.attempt, last.generation) == (saved.attempt, saved.generation):
            return last.iterations_done
    return splits.began or None
