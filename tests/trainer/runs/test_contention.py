"""A busy machine is no slow link: real stages, no fault.

``PIPEMORPH_SOAK_FACTOR=10 make soak`` runs these for about an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest_of

FACTOR = float(os.environ.get("PIPEMORPH_SOAK_FACTOR", "1"))
FIRST_ITERATIONS = 30
"""First iteration after plans for op times that were unknown before the start."""
PROCESSORS = len(os.sched_getaffinity(0))


def train(folder: Path, stages: int, iterations: int) -> tuple[dict[str, Any], str]:
    """The report and the display of a GPT without a fault."""
    spec = {
        "parallelism": {"stages": stages, "layers": 2 * stages},
        "schedule": {"microbatches": 8},
        "trainer": {
            "module": "pipemorph_trainer.examples.gpt",
            "iterations": iterations,
            "args": {"width": 128, "heads": 4, "sequence": 128, "microbatch_size": 2},
        },
    }
    (folder / "job.yaml").write_text(json.dumps(manifest_of(spec)))
    done = subprocess.run(
        [sys.executable, "-m", "pipemorph.cli", "run", "job.yaml", "--out", "out"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=60 + 4 * iterations,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "out" / "report.json").read_text()), done.stdout


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("busy", [False, True], ids=["quiet", "a busy loop"])
def test_a_gpt_without_a_fault_keeps_its_plan(tmp_path: Path, busy: bool) -> None:
    """The first measured op times may call for another plan, such as one with fused backwards,
    which then has to pay. During a busy loop one stage is slower indeed, and may be planned for;
    links are not."""
    if PROCESSORS < 2:
        pytest.skip("a host with one processor is crowded")
    loop = None
    if busy:
        loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        os.sched_setaffinity(loop.pid, {min(os.sched_getaffinity(0))})
    try:
        report, said = train(tmp_path, 2, max(10, round(400 * FACTOR)))
    finally:
        if loop is not None:
            loop.kill()
            loop.wait()
    changes = report["adaptations"]
    about_ops = ("op times", "the last change did not bring") if busy else ("op times",)
    assert [each for each in changes if not each["reason"].startswith(about_ops)] == []
    if not busy:
        assert len(changes) <= 1
        for each in changes:
            assert each["applied_at_iteration"] <= FIRST_ITERATIONS, each
            assert each["measured"] >= each["promised"] / 2, each
        predicted = report["predicted"]
        assert predicted["seconds"] == pytest.approx(predicted["measured"], rel=0.08), predicted
    assert "slow link" not in said


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_more_ranks_than_processors_keep_their_plan_and_say_so_once(tmp_path: Path) -> None:
    if PROCESSORS > 8:
        pytest.skip("it would take more ranks than this test starts")
    report, said = train(tmp_path, 2 * PROCESSORS, 10)
    assert [each["reason"] for each in report["adaptations"]] == []
    assert said.count("2 ranks per processor compute on a host") == 1
