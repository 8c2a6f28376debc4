"""Places of ranks, and the wires between them."""

from __future__ import annotations

import pytest

from pipemorph.errors import InputError
from pipemorph.spec.layout import Layout, RankLayout, may_change_places
from pipemorph.spec.mesh import MeshShape

MESH = MeshShape(stages=2, replicas=4, order=("dp_replicate", "pp"))


def test_rings_and_links_go_over_wires_between_pods() -> None:
    layout = Layout.build_first(MESH)
    assert layout.rings == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert list(layout.find_ring_wires((0, 2, 4, 6))) == [(0, 2), (2, 4), (4, 6), (0, 6)]
    assert layout.find_link_wire(0, 2) == (4, 5)
    of_pods = Layout.build_first(MESH, ranks_per_pod=2)
    assert list(of_pods.find_ring_wires((0, 2, 4, 6))) == [(0, 1), (1, 2), (2, 3), (0, 3)]
    assert of_pods.find_link_wire(0, 2) == (2, 2)


def test_ranks_change_places() -> None:
    layout = Layout.build_first(MESH).swap_places(2, 5)
    assert not layout.is_first
    assert layout.find_moved_ranks(Layout.build_first(MESH)) == (2, 5)
    assert list(layout.find_ring_wires((0, 2, 4, 6))) == [(0, 5), (4, 5), (4, 6), (0, 6)]
    assert Layout.build_first(MESH).read_places(layout.places_json) == layout
    assert layout.swap_places(2, 5).is_first


@pytest.mark.parametrize("text", ["", "3", "[0, 1]", "[0,1,2,3,4,5,6,6]", '{"0": 1}', "[" * 9999])
def test_places_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="each number below 8 once"):
        Layout.build_first(MESH).read_places(text)


def test_layers_are_spread_over_the_stages() -> None:
    layout = Layout.build_first(MeshShape(stages=4))
    assert layout.spread_layers(16) == (4, 4, 4, 4)
    other = layout.with_layers((5, 3, 4, 4))
    assert other.spread_layers(16) == other.layers == (5, 3, 4, 4)
    # Layer 4, of stage 1, is the only one that moves; here every stage gives one to the next.
    assert (layout.count_moved_layers(other, 16), layout.find_moved_ranks(other)) == (1, ())
    assert layout.count_moved_layers(layout.with_layers((3, 4, 4, 5)), 16) == 3
    assert other.with_layers((4, 4, 4, 4)) == layout
    assert Layout.read_layers("[5, 3, 4, 4]", 4) == other.layers


@pytest.mark.parametrize("text", ["", "8", "[1, 2]", "[1, 2, 3, 0]", '["1", 2, 3, 4]', "[" * 9999])
def test_layers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="a JSON array of 4 numbers of layers"):
        Layout.read_layers(text, 4)


def test_a_layout_in_messages_has_no_numbers_of_the_beginning() -> None:
    first = Layout.build_first(MeshShape(stages=2, replicas=2), ranks_per_pod=2)
    assert not first.rank_layout and str(first.rank_layout) == "the first layout"
    moved = first.swap_places(1, 2)
    assert (moved.rank_layout, str(moved.rank_layout)) == (
        RankLayout(places=(0, 2, 1, 3)),
        "places 0, 2, 1, 3",
    )
    assert first.to_explicit_layout(4) == RankLayout(layers=(2, 2), places=(0, 1, 2, 3))
    assert moved.apply_rank_layout(RankLayout(layers=(3, 1))) == first.with_layers((3, 1))
    assert (
        first.apply_rank_layout(moved.rank_layout) == moved
        and moved.apply_rank_layout(RankLayout()) == first
    )
    assert [moved.rank_layout.find_ranks_in_pod(pod, 2) for pod in (0, 1)] == [[0, 2], [1, 3]]
    assert [moved.rank_layout.find_pod(rank, 2) for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(InputError, match="each number below 4 once"):
        first.apply_rank_layout(RankLayout(places=(0, 1, 2, 2)))


def test_ranks_change_places_where_one_runs_each_stage_of_several_replicas() -> None:
    assert may_change_places(MESH)
    for other in (MeshShape(2, 1), MeshShape(2, 4, tensor=2), MeshShape(2, 512)):
        assert not may_change_places(other)
