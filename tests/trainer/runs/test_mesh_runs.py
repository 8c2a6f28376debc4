"""Jobs on meshes under ``pipemorph run``: one link of one column is slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from local_runs import manifest, report_of

pytestmark = [pytest.mark.times, pytest.mark.timeout(300)]

SLOW_FROM, ITERATIONS, DELAY_MS = 6, 20, 30


@dataclass(frozen=True)
class Case:
    """``parallelism``: of the job. ``link``, ``column``: which link becomes slow; ``named``: its
    name for users."""

    parallelism: dict[str, Any]
    link: int
    column: int
    named: str
    op_ms: float = 12
    microbatches: int = 10

    def manifest(self) -> dict[str, Any]:
        op = dict.fromkeys(("forward", "backwardInput", "backwardWeight"), self.op_ms)
        fault = {
            "link": self.link, "replica": self.column, "fromIteration": SLOW_FROM,
            "delayMs": DELAY_MS,
        }  # fmt: skip
        return manifest(
            parallelism=self.parallelism,
            schedule={"microbatches": self.microbatches, "policy": "pipemorph"},
            emulation={"stageTimes": [op], "messageBytes": 4096},
            faults=[fault],
            trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS},
        )


SEVERAL = {"stages": 4, "stagesPerRank": 2, "stagePlacement": "interleaved"}
CASES = {
    "replicas, tensor": Case(
        {"stages": 2, "replicas": 2, "tensor": 2}, 0, 3, "link 0 of replica 1, tensor 1"
    ),
    # Slow link: from the second rank to the first one.
    "interleaved, replicas": Case(
        SEVERAL | {"replicas": 2}, 1, 1, "link 1 of replica 1", op_ms=8, microbatches=8
    ),
    "fsdp": Case({"stages": 2, "shard": 2}, 0, 1, "link 0 of shard 1"),
    "context": Case({"stages": 2, "context": 2}, 0, 1, "link 0 of context 1"),
}
LONGER = {"context"}
"""Cases of `make soak`: the host treats these ranks as those of ``fsdp``."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.soak] * (each in LONGER)) for each in CASES]
)
def test_a_slow_link_is_named_by_its_coordinate_and_planned_for(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    report = report_of(tmp_path, case.manifest())
    adapted = [each for each in report["adaptations"] if each["kind"] == "adapt"]
    assert adapted, report["said"]
    assert f"{case.named} is slow by" in adapted[-1]["reason"], report["said"]
    links = {(link["link"], link["replica"]) for link in adapted[-1]["links"]}
    assert links == {(case.link, case.column)}
    seconds = [each["seconds"] for each in report["iterations"]]
    assert median(seconds[-5:]) < 0.92 * seconds[SLOW_FROM], seconds
