"""Which pod has which place in the next generation: spares take those of lost pods. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pipemorph.api.running import Running
from pipemorph.wire.generations import MAX_MOVED


class Filled(NamedTuple):
    """``running``: the next generation, without the replicas that lack a pod. ``taken``: spares
    that have a place from now on, with the pods that had it."""

    running: Running
    taken: dict[int, int]


def fill(before: Running, ready: Collection[int], late: Collection[int] = ()) -> Filled:
    """``before``: the generation before. ``ready``: pods that can begin. ``late``: those of them
    that have only just begun, in the places of lost ones: a spare, which has its programs imported,
    goes before, and they are spares from then on.

    Spares are used only where they make a replica whole; without ``minReplicas``, the job.
    """
    cut, there = before.cut, frozenset(ready)
    # Of a large job, look only at what has changed.
    lacking: dict[range, list[int]] = {}
    for pod in before.holders - (there - frozenset(late)):
        place = before.place(pod)
        assert place is not None, "a pod that holds a place has one"
        of = range(cut.replicas) if cut.min_replicas is None else before.of_place(place)
        lacking.setdefault(of, []).append(place)
    free = sorted(there - before.holders)
    moved, without = dict(before.places), set[int]()
    taken: dict[int, int] = {}
    # So many replicas are made whole as can be.
    for replicas, places in sorted(lacking.items(), key=lambda each: (len(each[1]), each[0].start)):
        found = _filled(before, sorted(places), list(free), there, MAX_MOVED - len(moved))
        if found is None:
            without.update(replicas)
            continue
        for place, pod in found.items():
            if pod != before.pod(place):
                taken[pod] = before.pod(place)
            moved[place] = pod
            if pod == place:
                del moved[place]
        free = [pod for pod in free if pod not in taken]
    left_out = tuple(sorted(without))
    return Filled(Running(cut, left_out, tuple(sorted(moved.items()))), taken)


def _filled(
    before: Running, places: list[int], free: list[int], there: Collection[int], room: int
) -> dict[int, int] | None:
    """A pod for each of these places; None if there are too few. ``free``: spares; ``room``: how
    many more places may be in pods of other numbers."""
    found: dict[int, int] = {}
    for place in places:
        had = before.pod(place)
        if place in free:
            pod = place
        elif free and (had != place or len(found) < room):
            pod = free[0]
        elif had in there:
            pod = had
        else:
            return None
        found[place] = pod
        if pod in free:
            free.remove(pod)
    return found
