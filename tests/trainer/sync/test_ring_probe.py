"""Measurements of the edges of a ring, and their reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipemorph.protocol import SlowestEdge
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.sync.reduction import ReductionRecord
from pipemorph_trainer.sync.ring_probe import MEASUREMENT_INTERVAL, RingProbe

WELL = [1e-3, 1.2e-3, 0.9e-3, 1e-3]


class Probe(RingProbe):
    """Probe of four ranks, whose edges take the times of ``now``."""

    def __init__(self) -> None:
        coordinate = MeshShape(replicas=4).find_coordinate(1)
        super().__init__(cast("Any", SimpleNamespace(coordinate=coordinate)), lambda _: None)
        self.now, self.measured = WELL, 0

    def _measure_edges(self) -> list[float]:
        self.measured += 1
        return self.now

    def sees(self, iteration: int, seconds: float) -> SlowestEdge | None:
        self.measure_if_due(ReductionRecord(iteration, 1 << 20, 8, seconds, seconds, seconds))
        return self.take_slowest_edge()


def test_edges_are_measured_once_while_all_is_well() -> None:
    probe = Probe()
    probe.measure_if_due(None)
    assert probe.take_slowest_edge() is None
    found = [probe.sees(iteration, 0.01) for iteration in range(1, 30)]
    assert found[0] == SlowestEdge(at=1, seconds=1.2e-3, usual=pytest.approx(1e-3))
    assert (probe.measured, any(found[1:])) == (1, False)


def test_edges_are_measured_while_reductions_are_long_and_once_after() -> None:
    probe = Probe()
    for iteration in range(1, 10):
        probe.sees(iteration, 0.01)
    probe.now = [1e-3, 1e-3, 31e-3, 1e-3]
    found = [probe.sees(iteration, 0.2) for iteration in range(10, 10 + 2 * MEASUREMENT_INTERVAL)]
    late = SlowestEdge(at=2, seconds=31e-3, usual=pytest.approx(1e-3))
    assert [each for each in found if each] == [late, late]
    probe.now = WELL
    found = [probe.sees(iteration, 0.01) for iteration in range(30, 50)]
    assert [each.at for each in found if each] == [1]
