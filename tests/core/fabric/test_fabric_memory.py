"""The memory over jobs: what counts as evidence, how it ages, and what survives a restart."""

from __future__ import annotations

import json
import time

import pytest

from pipemorph.fabric.memory import HALF_LIFE, RECOVERED_SECONDS, End, FabricMemory

A, B, C = End("a"), End("b"), End("c")


def weights(memory: FabricMemory, now: float) -> dict[tuple[str, str], tuple[float, float]]:
    return {
        (e.ends[0].node, e.ends[1].node): (round(e.slow, 3), round(e.healthy, 3))
        for e in memory.evidence(now)
    }


def test_links_of_one_job_between_the_same_ends_are_one_piece_of_evidence() -> None:
    memory = FabricMemory()
    for at in range(100):
        memory.observe("j", A, B, slow=True, now=float(at))
        memory.observe("j", B, A, slow=True, now=float(at))
    memory.observe("k", A, B, slow=True, now=99.0)
    memory.observe("k", A, A, slow=True, now=99.0)
    assert weights(memory, 99.0) == {("a", "b"): (2.0, 0.0)}
    for job in range(10):
        memory.observe(f"other-{job}", A, B, slow=True, now=99.0)
    assert weights(memory, 99.0) == {("a", "b"): (3.0, 0.0)}, "bounded, whatever the jobs"


def test_evidence_ages_and_is_dropped() -> None:
    memory = FabricMemory()
    memory.observe("j", A, B, slow=True, now=0.0)
    memory.observe("j", A, C, slow=False, now=0.0)
    assert weights(memory, HALF_LIFE) == {("a", "b"): (0.5, 0.0), ("a", "c"): (0.0, 0.5)}
    memory.forget_old(5 * HALF_LIFE)
    assert len(memory) == 2
    memory.forget_old(7 * HALF_LIFE)
    assert len(memory) == 0


def test_a_pair_recovers_when_it_was_healthy_for_long_enough_in_any_job() -> None:
    memory = FabricMemory()
    memory.observe("j", A, B, slow=True, now=0.0)
    memory.observe("j", A, B, slow=False, now=1.0)
    assert weights(memory, 1.0) == {("a", "b"): (1.0, 0.0)}, "for a moment only"
    memory.observe("k", A, B, slow=True, now=2.0)
    memory.observe("k", A, B, slow=False, now=RECOVERED_SECONDS)
    memory.observe("k", A, B, slow=False, now=2 * RECOVERED_SECONDS - 1)
    assert weights(memory, 1200.0)["a", "b"][0] > 1.7
    memory.observe("k", A, B, slow=False, now=2 * RECOVERED_SECONDS)
    slow, healthy = weights(memory, 1200.0)["a", "b"]
    assert (slow, healthy > 1.8) == (0.0, True), "the other job's sighting is out of date as well"


def test_a_job_whose_link_stays_slow_is_not_overruled_by_another_with_a_healthy_one() -> None:
    memory = FabricMemory()
    for at in range(0, 3600, 60):
        memory.observe("j", A, B, slow=True, now=float(at))
        memory.observe("k", A, B, slow=False, now=float(at))
    assert weights(memory, 3540.0) == {("a", "b"): (1.0, 1.0)}


def test_the_memory_is_bounded_and_drops_what_was_not_seen_for_longest() -> None:
    memory = FabricMemory(most=2)
    memory.observe("j", A, B, slow=True, now=0.0)
    memory.observe("j", A, C, slow=True, now=1.0)
    memory.observe("j", A, B, slow=True, now=2.0)
    memory.observe("j", B, C, slow=True, now=3.0)
    assert set(weights(memory, 3.0)) == {("a", "b"), ("b", "c")}


def test_a_restart_keeps_what_concerns_nodes_with_slow_links() -> None:
    memory = FabricMemory()
    far = End("far")
    memory.observe("j", far, End("away"), slow=False, now=0.0)
    memory.observe("j", A, B, slow=True, now=10.0)
    memory.observe("j", A, B, slow=False, now=60.0)
    memory.observe("j", End("b", "mlx5_0/1"), C, slow=False, now=70.0)
    dumped = json.loads(json.dumps(memory.dump(100.0)))
    found = FabricMemory.restore(dumped)
    assert len(found) == 2
    kept = {e for e in memory.evidence(100.0) if far not in e.ends}
    assert set(found.evidence(100.0)) == kept
    assert found.dump(100.0) == dumped
    found.observe("j", A, B, slow=False, now=60.0 + RECOVERED_SECONDS)
    assert weights(found, 700.0)["a", "b"][0] == 0.0, "since when it was healthy is kept"


def test_two_memories_of_the_same_links_are_as_one() -> None:
    """Whichever host a job had when: each has seen a part."""
    whole, first, second = FabricMemory(), FabricMemory(), FabricMemory()
    seen = [(0.0, True), (30.0, False), (60.0, False), (400.0, False), (700.0, False)]
    for at, slow in seen:
        whole.observe("j", A, B, slow=slow, now=at)
        (first if at < 100 else second).observe("j", A, B, slow=slow, now=at)
    second.observe("k", A, C, slow=True, now=700.0)
    whole.observe("k", A, C, slow=True, now=700.0)
    for into, other in ((first, second), (second, first)):
        merged = FabricMemory.restore(into.dump(700.0))
        merged.merge(other)
        assert weights(merged, 700.0) == weights(whole, 700.0) == {
            ("a", "b"): (0.0, 1.0), ("a", "c"): (1.0, 0.0)
        }  # fmt: skip
    # What was slow later is not overruled by an older one that was well.
    second.observe("j", A, B, slow=True, now=800.0)
    first.merge(second)
    assert weights(first, 800.0)["a", "b"][0] == 1.0


def test_a_merged_memory_is_bounded_too() -> None:
    memory, other = FabricMemory(most=3), FabricMemory()
    memory.observe("j", A, B, slow=True, now=5.0)
    for at in range(4):
        other.observe("j", A, End(f"n{at}"), slow=True, now=float(at))
    memory.merge(other)
    assert set(weights(memory, 5.0)) == {("a", "b"), ("a", "n3"), ("a", "n2")}


def test_what_a_restart_keeps_is_bounded_however_long_the_names_are() -> None:
    """A ConfigMap holds 1 MiB."""
    memory = FabricMemory()
    for i in range(3000):
        memory.observe("j", End(f"{i:0253}"), End(f"{i + 1:0253}"), slow=True, now=float(i))
    dumped = memory.dump(3000.0)
    assert 300_000 < len(json.dumps(dumped)) < 700_000
    assert dumped["sightings"][0][-2] == 1, "the newest are kept"


def test_many_jobs_between_two_nodes_are_weighed_at_once() -> None:
    memory = FabricMemory()
    for number in range(20_000):
        memory.observe(f"j{number}", A, B, slow=True, now=0.0)
    began = time.process_time()
    memory.evidence(0.0)
    assert time.process_time() - began < 1.0, "not every job against every other: minutes"


@pytest.mark.parametrize(
    "dumped",
    [{}, {"at": 1, "names": ["j"], "sightings": [[0, 0, 9, 0, 0, 1, 1, None]]},
     {"at": 1, "names": ["j"], "sightings": [[0, 0, 0, 0, 0, 1, None, None]]},
     {"at": "x", "names": [], "sightings": []}],
)  # fmt: skip
def test_anything_else_is_refused(dumped: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a dump of a fabric's memory"):
        FabricMemory.restore(dumped)


def test_what_is_told_late_counts_as_of_when_it_was_seen() -> None:
    """A check before training is known when the job reports."""
    memory = FabricMemory()
    memory.observe("j", A, B, slow=False, now=100.0)
    memory.observe("j", A, B, slow=True, now=50.0)
    assert weights(memory, 100.0) == {("a", "b"): (0.995, 0.0)}
    memory.observe("j", A, B, slow=False, now=50.0 + RECOVERED_SECONDS)
    memory.observe("j", A, B, slow=False, now=100.0 + RECOVERED_SECONDS)
    assert weights(memory, 700.0)["a", "b"][0] == 0.0
    memory.observe("j", A, B, slow=True, now=50.0)
    assert weights(memory, 700.0)["a", "b"][0] == 0.0, "told again"


def test_ends_that_were_measured_and_are_well_need_no_second_look() -> None:
    memory = FabricMemory()
    memory.observe("j", A, B, slow=True, now=0.0, proven=True)
    memory.observe("k", A, B, slow=False, now=2 * RECOVERED_SECONDS)
    assert weights(memory, 1200.0)["a", "b"][0] > 0.8
    memory.observe("l", A, B, slow=False, now=2 * RECOVERED_SECONDS, proven=True)
    assert weights(memory, 1200.0)["a", "b"][0] == 0.0
