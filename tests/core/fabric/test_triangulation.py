"""Which part of the network slow links accuse, and when it is told."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pipemorph.fabric.findings import ACCUSED, Finding, Findings, nodes
from pipemorph.fabric.memory import End, FabricMemory, PairEvidence
from pipemorph.fabric.triangulation import Kind, Part, Suspect, suspects

RACKS = {f"{rack}{i}": rack for rack in "ABC" for i in range(4)}


def pair(a: str, b: str, slow: float = 0.0, healthy: float = 0.0) -> PairEvidence:
    first, second = (End(*each.split("/")) for each in (a, b))
    return PairEvidence((first, second), slow, healthy)


def slow(a: str, b: str, jobs: float = 1.0) -> PairEvidence:
    return pair(a, b, slow=jobs)


def well(a: str, b: str) -> PairEvidence:
    return pair(a, b, healthy=1.0)


def confidences(
    evidence: list[PairEvidence], racks: dict[str, str] | None = None
) -> dict[tuple[str, str], float]:
    found = suspects(evidence, racks or {})
    return {(s.part.kind.value, s.part.name): s.confidence for s in found}


def test_one_slow_link_accuses_both_ends_equally_with_little_confidence() -> None:
    found = confidences([slow("a", "b")])
    assert found["node", "a"] == found["node", "b"] < 0.1
    found = confidences([slow("a", "b"), well("b", "c"), well("b", "d")])
    assert found["node", "a"] > 2 * found.get(("node", "b"), 0.0)
    found = confidences([slow("a", "b", 3.0)])
    assert 0.4 < found["node", "a"] == found["node", "b"] < 0.5, "a half each, however often"


def test_slow_links_that_share_an_end_accuse_it() -> None:
    others = [well("x", "p"), well("y", "q"), well("z", "r")]
    two = confidences([slow("a", "x"), slow("a", "y"), *others])
    assert 0.5 < two["node", "a"] < ACCUSED
    three = confidences([slow("a", "x"), slow("a", "y"), slow("a", "z"), *others])
    assert three["node", "a"] > 0.99
    assert set(three) == {("node", "a")}
    part = confidences([slow("a", "x"), slow("a", "y"), well("a", "z"), well("a", "w"), *others])
    assert part["node", "a"] < 0.5, "most of its links are healthy"


def test_a_port_is_accused_where_the_node_s_other_port_is_well() -> None:
    evidence = [slow("a/p0", f"{x}/p0") for x in "wxyz"] + [well("a/p1", f"{x}/p1") for x in "wxyz"]
    found = confidences(evidence)
    assert found["port", "a/p0"] > ACCUSED > 0.1 > found.get(("node", "a"), 0.0)


def test_slow_links_between_racks_accuse_the_network_between_them() -> None:
    within = [well(f"{r}{i}", f"{r}{i + 1}") for r in "ABC" for i in range(3)]
    between = [slow("A0", "B0"), slow("A1", "B1"), slow("A2", "B2"), slow("A3", "B3")]
    found = confidences([*between, *within], RACKS)
    assert found["uplink", "A+B"] > 0.8, "which of the two cannot be told"
    assert not any(kind == "node" for kind, _ in found)
    third = [slow("A0", "C0"), slow("A1", "C1"), well("B0", "C0"), well("B1", "C1")]
    found = confidences([*between, *third, *within], RACKS)
    assert found["uplink", "A"] > ACCUSED
    # Links within the rack are slow as well: it is its switch, not its uplinks.
    inside = [slow(f"A{i}", f"A{i + 1}") for i in range(3)]
    rest = [well(f"{r}{i}", f"{r}{i + 1}") for r in "BC" for i in range(3)]
    assert confidences([*between, *third, *inside, *rest], RACKS)["switch", "A"] > ACCUSED


def test_two_sick_nodes_are_both_found() -> None:
    evidence = [slow("a", x) for x in "wxyz"] + [slow("b", x) for x in "wxyz"]
    evidence += [well(x, f"{x}'") for x in "wxyz"] + [well(x, f"{x}''") for x in "wxyz"]
    found = confidences(evidence)
    assert min(found["node", "a"], found["node", "b"]) > ACCUSED


def test_nothing_slow_accuses_nobody() -> None:
    assert suspects([well("a", "b")], RACKS) == []
    assert suspects([], RACKS) == []


@pytest.mark.parametrize("fault", ["node", "port", "uplink", "none"])
def test_drawn_faults_are_found_and_nothing_else_is_accused(fault: str) -> None:
    """Jobs on drawn nodes; a drawn part is sick; one pair in 200 is reported without a reason."""
    found = wrong = 0
    for seed in range(12):
        rng = random.Random(f"{fault} {seed}")
        node = rng.choice(sorted(RACKS))
        sick = {"node": node, "port": f"{node}/p0", "uplink": RACKS[node]}.get(fault, "")
        memory = FabricMemory()
        for job in range(30):
            first = rng.randrange(12)
            packed = [(sorted(RACKS) * 2)[first + i] for i in range(6)]
            placed = rng.sample(sorted(RACKS), 6) if job % 2 else packed
            for one, two in pairwise(placed):
                ends = End(one, f"p{rng.randrange(2)}"), End(two, f"p{rng.randrange(2)}")
                hit = {
                    "node": sick in (one, two),
                    "port": any(f"{e.node}/{e.port}" == sick for e in ends),
                    "uplink": RACKS[one] != RACKS[two] and sick in (RACKS[one], RACKS[two]),
                    "none": False,
                }[fault]
                late = (hit and rng.random() < 0.8) or rng.random() < 1 / 200
                memory.observe(str(job), *ends, slow=late, now=0.0)
        accused = [s.part for s in suspects(memory.evidence(0.0), RACKS) if s.confidence >= ACCUSED]
        # A rack's switch stands for its uplinks where few links within the rack are known.
        kinds = {Kind.UPLINK, Kind.SWITCH} if fault == "uplink" else {fault}
        right = [part for part in accused if part.kind in kinds and part.name == sick]
        found += len(right) == (fault != "none")
        wrong += sum(part.name != sick for part in accused)
    assert found >= 10, f"{found} of 12"
    assert wrong == 0


def told(confidence: float, name: str = "a") -> list[Suspect]:
    return [Suspect(Part(Kind.NODE, name), confidence, 3, 4)]


def test_an_accusation_stands_until_the_confidence_is_low() -> None:
    findings = Findings()
    assert findings.update(told(0.6), {}, 1.0) == ([], [])
    assert nodes(findings.all, accused=True) == {}
    assert list(nodes(findings.all, accused=False)) == ["a"]
    accused, well_again = findings.update(told(0.95), {"a": ["mlx5_0/1"]}, 2.0)
    assert [each.text for each in accused] == [
        "node a: 3 of 4 pairs of ends with links through it were slow; its ports mlx5_0/1 report"
        " errors (confidence 0.95)"
    ]
    assert (accused[0].since, well_again) == (1.0, [])
    assert findings.update(told(0.6), {}, 3.0) == ([], [])
    # A restart keeps it.
    findings = Findings(Finding.of(each.record()) for each in findings.all)
    assert list(nodes(findings.all, accused=True)) == ["a"]
    accused, well_again = findings.update(told(0.4), {}, 4.0)
    assert (accused, [each.name for each in well_again]) == ([], ["a"])
    assert findings.all == []


def test_a_port_stands_for_its_node() -> None:
    findings = Findings()
    findings.update([Suspect(Part(Kind.PORT, "a/mlx5_0"), 0.95, 3, 4)], {}, 0.0)
    findings.update([*told(0.95, "b"), Suspect(Part(Kind.UPLINK, "A"), 0.99, 9, 9)], {}, 1.0)
    assert set(nodes(findings.all, accused=True)) == {"b"}
    with pytest.raises(ValueError, match="not a finding"):
        Finding.of({"kind": "planet"})
