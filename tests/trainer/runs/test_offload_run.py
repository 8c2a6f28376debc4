"""`pipemorph run` of a job whose device has room for few microbatches and whose link is slow:
with host memory to use, the plan changes to use it, and iterations are shorter. Emulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_runs import DEADLINE, Done, manifest, run

pytestmark = pytest.mark.times

STAGES, ROOM, SLOW_LINK, SLOW_FROM, ITERATIONS = 4, 4, 2, 3, 16
TIMES = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0, "offloadCopy": 1.0}
BYTES = 1 << 20


def job(**adaptation: Any) -> dict[str, Any]:
    fault = {"link": SLOW_LINK, "fromIteration": SLOW_FROM, "delayMs": 60.0}
    return manifest(
        schedule={"microbatches": 12, "policy": "pipemorph", "inFlightLimit": ROOM},
        emulation={
            "stageTimes": [TIMES], "messageBytes": 16384, "standsForBytes": 1 << 24,
            "activationBytes": BYTES,
        },
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS},
        adaptation=adaptation,
        faults=[fault],
    )  # fmt: skip


def last_iterations(done: Done) -> list[float]:
    return [row["seconds"] for row in done.report["iterations"][-4:]]


def traces(done: Done, rank: int) -> list[dict[str, Any]]:
    (found,) = done.out.rglob(f"ops-rank{rank}.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


def device_peak(line: dict[str, Any]) -> int:
    """Maximum of microbatches on the device at a moment, from the ops of a rank's trace."""
    changes = []
    for kind, microbatch, start, end in line["ops"]:
        copied = {(way, m): (begun, ended) for way, m, begun, ended, _ in line.get("copies", ())}
        if kind == "F":
            changes.append((start, 1))
            if ("out", microbatch) in copied:
                changes.append((copied["out", microbatch][1], -1))
        elif kind in ("B", "BW") and ("back", microbatch) in copied:
            changes.append((copied["back", microbatch][0], 1))
        if kind in ("W", "BW"):
            changes.append((end, -1))
    held = most = 0
    # Ends at a moment come before begins at that moment.
    for _, change in sorted(changes, key=lambda each: (each[0], each[1])):
        held += change
        most = max(most, held)
    assert held == 0
    return most


@pytest.mark.timeout(4 * DEADLINE)
def test_host_memory_shortens_iterations_behind_a_slow_link(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    without = run(tmp_path / "without", job())
    assert without.status == 0, without
    done = run(tmp_path / "with", job(allowOffload=True, hostMemory=8 * BYTES))
    assert done.status == 0, done
    # 720 and 511 ms by the simulator. A busy machine adds to some, and takes off none.
    before, after = min(last_iterations(without)), min(last_iterations(done))
    assert after < 0.85 * before, (before, after, str(done))
    losses = [[row["loss"] for row in each.report["iterations"]] for each in (without, done)]
    assert losses[0] == losses[1]
    for rank in range(STAGES):
        plain = traces(without, rank)
        assert not any("copies" in line for line in plain)
        lines = traces(done, rank)
        assert max(map(device_peak, lines)) <= ROOM, f"rank {rank}"
        moved = [len(line.get("copies", ())) for line in lines]
        assert not any(moved[:SLOW_FROM])
        if rank < SLOW_LINK:
            assert moved[-1] > 0, f"rank {rank} sent nothing to host memory at the end"
            assert all(nbytes == BYTES for *_, nbytes in lines[-1]["copies"])
    reasons = json.dumps(done.report)
    assert "host memory" in reasons or "offload" in reasons
