"""Places of ranks, and the wires between them."""

from __future__ import annotations

import pytest

from pipemorph.api.layout import Layout, RankLayout, may_change_places
from pipemorph.api.mesh import MeshShape
from pipemorph.errors import InputError

MESH = MeshShape(stages=2, replicas=4, order=("dp_replicate", "pp"))


def test_rings_and_links_go_over_wires_between_pods() -> None:
    layout = Layout.first(MESH)
    assert layout.rings == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert list(layout.edges((0, 2, 4, 6))) == [(0, 2), (2, 4), (4, 6), (0, 6)]
    assert layout.link(0, 2) == (4, 5)
    of_pods = Layout.first(MESH, ranks_per_pod=2)
    assert list(of_pods.edges((0, 2, 4, 6))) == [(0, 1), (1, 2), (2, 3), (0, 3)]
    assert of_pods.link(0, 2) == (2, 2)


def test_ranks_change_places() -> None:
    layout = Layout.first(MESH).swapped(2, 5)
    assert not layout.is_first
    assert layout.moved(Layout.first(MESH)) == (2, 5)
    assert list(layout.edges((0, 2, 4, 6))) == [(0, 5), (4, 5), (4, 6), (0, 6)]
    assert Layout.first(MESH).read(layout.text) == layout
    assert layout.swapped(2, 5).is_first


@pytest.mark.parametrize("text", ["", "3", "[0, 1]", "[0,1,2,3,4,5,6,6]", '{"0": 1}', "[" * 9999])
def test_places_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="each number below 8 once"):
        Layout.first(MESH).read(text)


def test_layers_are_spread_over_the_stages() -> None:
    layout = Layout.first(MeshShape(stages=4))
    assert layout.spread(16) == (4, 4, 4, 4)
    other = layout.with_layers((5, 3, 4, 4))
    assert other.spread(16) == other.layers == (5, 3, 4, 4)
    # Layer 4, of stage 1, is the only one that moves; here every stage gives one to the next.
    assert (layout.handed_over(other, 16), layout.moved(other)) == (1, ())
    assert layout.handed_over(layout.with_layers((3, 4, 4, 5)), 16) == 3
    assert other.with_layers((4, 4, 4, 4)) == layout
    assert Layout.read_layers("[5, 3, 4, 4]", 4) == other.layers


@pytest.mark.parametrize("text", ["", "8", "[1, 2]", "[1, 2, 3, 0]", '["1", 2, 3, 4]', "[" * 9999])
def test_layers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="a JSON array of 4 numbers of layers"):
        Layout.read_layers(text, 4)


def test_a_layout_in_messages_has_no_numbers_of_the_beginning() -> None:
    first = Layout.first(MeshShape(stages=2, replicas=2), ranks_per_pod=2)
    assert not first.told and str(first.told) == "the first layout"
    moved = first.swapped(1, 2)
    assert (moved.told, str(moved.told)) == (RankLayout(places=(0, 2, 1, 3)), "places 0, 2, 1, 3")
    assert first.whole(4) == RankLayout(layers=(2, 2), places=(0, 1, 2, 3))
    assert moved.changed(RankLayout(layers=(3, 1))) == first.with_layers((3, 1))
    assert first.changed(moved.told) == moved and moved.changed(RankLayout()) == first
    assert [moved.told.ranks_in(pod, 2) for pod in (0, 1)] == [[0, 2], [1, 3]]
    assert [moved.told.pod(rank, 2) for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(InputError, match="each number below 4 once"):
        first.changed(RankLayout(places=(0, 1, 2, 2)))


def test_ranks_change_places_where_one_runs_each_stage_of_several_replicas() -> None:
    assert may_change_places(MESH)
    for other in (MeshShape(2, 1), MeshShape(2, 4, tensor=2), MeshShape(2, 512)):
        assert not may_change_places(other)
