"""Which pods have which places in the next generation."""

from __future__ import annotations

from typing import Any

import pytest

from pipemorph.api.running import Running
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_recoveries import MAX_PLACES
from pipemorph.control.pods import places as places_module
from pipemorph.control.pods.places import fill
from pipemorph.wire.generations import MAX_MOVED

WITH_FEWER = {"min_replicas": 1, "order": ["dp_replicate", "pp"]}


def cut(spares: int, **more: Any) -> Parallelism:
    """Six places. With fewer replicas 0 and 1 are those of replica 0, and so on."""
    return Parallelism(stages=2, replicas=3, spares=spares, **more)


def all_but(running: Running, *pods: int) -> set[int]:
    return set(range(running.cut.all_pods)) - set(pods)


def test_a_spare_takes_the_place_of_a_lost_pod_and_that_is_a_spare_when_it_is_back() -> None:
    first = Running(cut(1))
    assert fill(first, all_but(first)) == (first, {})
    second, taken = fill(first, all_but(first, 3))
    assert (second.places, second.left_out, taken) == (((3, 6),), (), {6: 3})
    assert second.pods == (0, 1, 2, 6, 4, 5) and second.fits()
    assert (second.place(3), second.place(6), second.has(3)) == (None, 3, False)
    third, taken = fill(second, all_but(first, 5))
    assert (third.places, taken) == (((3, 6), (5, 3)), {3: 5})
    fourth, taken = fill(third, all_but(first, 6))
    assert (fourth.places, taken) == (((3, 5), (5, 3)), {5: 6}), "each in a pod of its own"
    assert fourth.fits() and sorted(fourth.pods) == [0, 1, 2, 3, 4, 5]


def test_the_pod_of_its_number_comes_first() -> None:
    moved = Running(cut(2), places=((3, 6), (5, 7)))
    found = fill(moved, all_but(moved, 7))
    assert (found.running.places, found.taken) == (((3, 6),), {5: 7})


def test_without_enough_spares_none_takes_a_place() -> None:
    first = Running(cut(1))
    found = fill(first, all_but(first, 3, 5))
    assert (found.running.places, found.taken) == ((), {})
    assert found.running.left_out == (0, 1, 2), "nothing runs"


def test_spares_make_as_many_replicas_whole_as_they_can() -> None:
    first = Running(cut(1, **WITH_FEWER))
    found = fill(first, all_but(first, 2, 3, 5))
    assert found.running.left_out == (1,)
    assert (found.running.places, found.taken) == (((5, 6),), {6: 5})
    two = Running(cut(2, **WITH_FEWER))
    assert fill(two, all_but(two, 0, 1, 3, 5)).running.left_out == (0,), "two for one"
    # The other pods of that replica keep their places, and wait.
    later = fill(found.running, all_but(first, 2, 5))
    assert later.running == found.running and later.taken == {}
    last = fill(later.running, all_but(first, 2))
    assert (last.running.left_out, last.running.places) == ((), ((2, 5), (5, 6)))


def test_a_spare_goes_before_a_pod_that_has_only_just_begun() -> None:
    first = Running(cut(1))
    found = fill(first, all_but(first), late={3})
    assert (found.running.places, found.taken) == (((3, 6),), {6: 3})
    without = fill(first, all_but(first, 6), late={3})
    assert without == (first, {})


def test_pods_of_several_replicas_have_one_place() -> None:
    whole = cut(1, ranks_per_pod=2, min_replicas=1, order=["dp_replicate", "pp"])
    first = Running(whole)
    assert whole.pods == 3
    assert fill(first, {0, 2}).running.left_out == (1,)
    assert fill(first, {0, 2, 3}).running == Running(whole, places=((1, 3),))


def test_no_more_places_move_than_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_MOVED == MAX_PLACES
    monkeypatch.setattr(places_module, "MAX_MOVED", 1)
    moved = Running(cut(2), places=((3, 6),))
    assert fill(moved, all_but(moved, 5)).running.left_out == (0, 1, 2)
    assert fill(moved, all_but(moved, 6)).running.places == ()
