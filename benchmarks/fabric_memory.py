"""How well sick parts of the network are found from the slow links of many jobs.

    python benchmarks/fabric_memory.py [--seeds 200] [--json FILE]

A network of 8 racks with 8 nodes and 2 ports each. In each of 8 hours 6 jobs of 4 to 12 stages run
on drawn nodes, one stage a node, each link over a drawn port of each end; a job takes neighbouring
nodes where it can, as a scheduler that packs does, and every third is spread over the cluster. Then
one part is sick, or none: a node, a port, or the uplinks of a rack, of which one in two is sick, so
that half of the links through them are slow. A link through a sick node or port is slow in nine
jobs of ten. One pair in 200 is reported as slow for no reason.

A part is *accused* at a confidence of 0.9. Precision: accused parts that were sick, of all accused
parts; a switch that stands for its uplinks counts. Recall: sick parts that were accused.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from pipemorph.fabric.findings import Findings
from pipemorph.fabric.memory import End, FabricMemory
from pipemorph.fabric.triangulation import suspects

RACKS, NODES, PORTS = 8, 8, 2
HOURS, JOBS = 8, 6
FALSE_ALARM = 1 / 200
SHOWN = {"node": 0.9, "port": 0.9, "uplink": 0.5}
FAULTS = ("node", "port", "uplink", "none")

RACK = {f"n{rack}-{i}": f"r{rack}" for rack in range(RACKS) for i in range(NODES)}


class Network:
    """A network with one sick part, and the jobs on it. ``fault``: one of :data:`FAULTS`."""

    def __init__(self, fault: str, rng: random.Random) -> None:
        node = rng.choice(sorted(RACK))
        names = {"node": node, "port": f"{node}/p{rng.randrange(PORTS)}", "uplink": RACK[node]}
        self.fault, self.name, self._rng = fault, names.get(fault, ""), rng

    def _sick(self, ends: tuple[End, End]) -> bool:
        match self.fault:
            case "node":
                return any(end.node == self.name for end in ends)
            case "port":
                return any(f"{end.node}/{end.port}" == self.name for end in ends)
            case "uplink":
                racks = {RACK[end.node] for end in ends}
                return len(racks) > 1 and self.name in racks
        return False

    def job(self, number: int) -> list[tuple[End, End, bool]]:
        """The links of a drawn job, and which are slow."""
        rng, names = self._rng, sorted(RACK)
        size, first = rng.randint(4, 12), rng.randrange(len(names))
        packed = [names[(first + i) % len(names)] for i in range(size)]
        placed = rng.sample(names, size) if number % 3 == 2 else packed
        out = []
        for a, b in pairwise(placed):
            ends = End(a, f"p{rng.randrange(PORTS)}"), End(b, f"p{rng.randrange(PORTS)}")
            shows = self._sick(ends) and rng.random() < SHOWN[self.fault]
            out.append((*ends, shows or rng.random() < FALSE_ALARM))
        return out

    def is_it(self, kind: str, name: str) -> bool:
        """Whether an accusation is right."""
        if self.fault == "uplink":
            return kind in ("uplink", "switch") and self.name in name.split("+")
        return (kind, name) == (self.fault, self.name)


def run(fault: str, seed: int) -> tuple[int, int, int | None, float]:
    """Accusations that were right and wrong, the hour of the first right one, and the longest time
    of one inference in seconds."""
    rng = random.Random(f"{fault} {seed}")
    network, memory, findings = Network(fault, rng), FabricMemory(), Findings()
    right: set[tuple[str, str]] = set()
    wrong: set[tuple[str, str]] = set()
    found_at, longest = None, 0.0
    for hour in range(HOURS):
        now = hour * 3600.0
        for job in range(JOBS):
            for a, b, slow in network.job(job):
                memory.observe(f"{hour}/{job}", a, b, slow=slow, now=now)
        began = perf_counter()
        accused, _ = findings.update(suspects(memory.evidence(now), RACK), {}, now)
        longest = max(longest, perf_counter() - began)
        for each in accused:
            what = each.kind, each.name
            (right if network.is_it(*what) else wrong).add(what)
            if network.is_it(*what) and found_at is None:
                found_at = hour + 1
    return len(right), len(wrong), found_at, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    print(f"{'fault':8} {'precision':>9} {'recall':>7} {'hours (median)':>15} {'wrong/day':>10}")
    for fault in FAULTS:
        runs = [run(fault, seed) for seed in range(options.seeds)]
        right, wrong = sum(bool(r[0]) for r in runs), sum(r[1] for r in runs)
        hours = sorted(r[2] for r in runs if r[2] is not None)
        rows[fault] = row = {
            "precision": right / (right + wrong) if right + wrong else None,
            "recall": right / len(runs) if fault != "none" else None,
            "hours": hours[len(hours) // 2] if hours else None,
            "wrong_per_day": wrong / len(runs) * 24 / HOURS,
            "inference_ms": 1e3 * max(r[3] for r in runs),
        }
        precision, recall = (
            "–" if row[name] is None else f"{row[name]:.3f}" for name in ("precision", "recall")
        )
        print(
            f"{fault:8} {precision:>9} {recall:>7} {row['hours'] or '–':>15}"
            f" {row['wrong_per_day']:>10.3f}"
        )
    print(f"longest inference: {max(r['inference_ms'] or 0 for r in rows.values()):.1f} ms")
    if options.json:
        options.json.write_text(json.dumps({"seeds": options.seeds, "faults": rows}, indent=1))


if __name__ == "__main__":
    main()
