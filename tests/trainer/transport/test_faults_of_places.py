"""Faults of a wire stay with its places when ranks change theirs; cuts are made once."""

from __future__ import annotations

import time
from statistics import fmean

import pytest

from pipemorph.spec.layout import Layout
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer.transport import fault_injection as module
from pipemorph_trainer.transport.fault_injection import (
    CHUNK_BYTES,
    FaultTrace,
    LinkFaults,
    ReductionFaults,
)
from pipemorph_trainer.transport.message import Direction

MESH = MeshShape(stages=2, replicas=4)
"""Stage 0 has ranks 0 to 3, stage 1 ranks 4 to 7."""
FIRST = Layout.build_first(MESH)
WIRE = Fault(between=[0, 1], delay_ms=30)
LINK = Fault(link=0, replica=2, delay_ms=20)


def of_group(layout: Layout, rank: int, *faults: Fault) -> ReductionFaults | None:
    return FaultTrace(faults, layout=layout).make_reduction_faults(MESH.find_coordinate(rank))


def test_a_wire_is_an_edge_of_a_ring_or_a_link() -> None:
    ring = of_group(FIRST, 2, WIRE)
    assert ring is not None
    assert [ring.compute_edge_delay(at, 0, time.time()) for at in range(4)] == [0.03, 0, 0, 0]
    assert of_group(FIRST, 5, WIRE) is None
    assert FaultTrace([WIRE], layout=FIRST).find_link_faults(0, 0) == []
    # The rank of place 1 and that of place 4, which is below place 0.
    moved = FIRST.swap_places(1, 4)
    assert of_group(moved, 2, WIRE) is None
    assert FaultTrace([WIRE], layout=moved).find_link_faults(0, 0) == [WIRE]
    assert FaultTrace([WIRE], layout=moved).find_link_faults(0, 1) == []


def test_a_link_takes_its_fault_along_to_a_ring() -> None:
    trace = FaultTrace([LINK], layout=FIRST)
    assert (trace.find_link_faults(0, 2), trace.find_link_faults(0, 1)) == ([LINK], [])
    # Places 2 and 6, which were the ends of the link, are now neighbours in the ring of stage 0.
    moved = FIRST.swap_places(3, 6)
    assert FaultTrace([LINK], layout=moved).find_link_faults(0, 2) == []
    ring = of_group(moved, 0, LINK)
    assert ring is not None
    assert [ring.compute_edge_delay(at, 0, time.time()) for at in range(4)] == [0, 0, 0.02, 0]


@pytest.mark.parametrize(
    ("nbytes", "rounds"), [(64, 1), (4 * CHUNK_BYTES, 1), (4 * CHUNK_BYTES + 1, 2)]
)
def test_a_bucket_goes_round_in_chunks(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, rounds: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    ring = of_group(FIRST, 0, WIRE)
    assert ring is not None
    sent = time.time()
    assert ring.hold_buckets([sent, sent], [nbytes, nbytes], 3) == [
        pytest.approx(sent + 6 * rounds * 0.03),
        pytest.approx(sent + 12 * rounds * 0.03),
    ]
    assert slept == [pytest.approx(12 * rounds * 0.03, abs=0.05)]
    (record,) = ring.report_effects()
    assert (record["between"], record["buckets_held"]) == ([0, 1], 2)


def test_each_message_has_a_jitter_of_its_own() -> None:
    def delays() -> list[float]:
        faults = LinkFaults([Fault(link=0, delay_ms=20, jitter_ms=10)], Direction.FORWARD)
        faults.begin_iteration(0, 0.0)
        return [faults.hold_message(queue, 8, 1.0).held_back for queue in range(400)]

    found = delays()
    assert found == delays(), "not repeatable"
    assert min(found) == pytest.approx(0.020, abs=3e-4)
    assert max(found) == pytest.approx(0.030, abs=3e-4)
    assert fmean(found) == pytest.approx(0.025, abs=1e-3)
    ring = of_group(FIRST, 2, Fault(between=[0, 1], jitter_ms=10))
    assert ring is not None
    assert ring.compute_edge_delay(0, 0, time.time()) == 0.005


def test_a_device_pauses_once_in_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    pause = Fault(device=2, pause_ms=500, from_iteration=1, to_iteration=3)
    device = FaultTrace([pause], layout=FIRST).make_device_faults(2)
    assert device is not None
    for iteration in (0, 1, 1, 2, 2, 3):
        device.hold_op(time.time(), iteration)
    assert slept == [0.5, 0.5]
    (record,) = device.report_effects()
    assert (record["ops_held"], record["hold_seconds"], record["last_iteration"]) == (2, 1.0, 2)


def test_ranks_that_start_again_do_not_repeat_a_cut() -> None:
    fault = Fault(link=0, from_iteration=5, to_iteration=6, sever="data")

    def cuts_at(*iterations: int) -> list[str]:
        made: list[str] = []
        faults = LinkFaults([fault], Direction.FORWARD)
        faults.cut = made.append
        for iteration in iterations:
            faults.begin_iteration(iteration, 0.0)
            faults.make_due_cuts(1.0)
            faults.make_due_cuts(2.0)
        return made

    assert cuts_at(3, 4, 5, 6) == ["data"]
    assert cuts_at(6, 7) == []
