"""How ``pipemorph run`` ends when a rank is killed, or its user stops it. Emulated."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import prepared_processes
import pytest
from local_runs import command, manifest, rank_of, read_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def test_a_rank_that_is_killed_ends_the_run_with_what_the_others_waited_for(
    tmp_path: Path,
) -> None:
    host = prepared_processes.PreparedProcess(
        command(tmp_path, manifest()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = read_until(host, 2)
    os.kill(rank_of(host.pid, 2), signal.SIGKILL)
    rest, _ = host.communicate(timeout=120)
    output = said + rest
    assert host.returncode == 1, output
    assert "rank 2 (stage 2) was killed by SIGKILL" in output
    # Killed in mid-schedule, its neighbours miss its messages; killed at the end of an iteration,
    # what all ranks agree on then. Whoever it was, each says what it waited for, or who is gone.
    for neighbour in (1, 3):
        waited = (
            rf"rank {neighbour} \(stage {neighbour}\) (waited [\d.]+ s for \S|exited .* rank 2)"
        )
        assert re.search(waited, output), output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["completed"] is False
    assert len(report["iterations"]) >= 2


def test_ctrl_c_in_mid_training(tmp_path: Path) -> None:
    checkpoint = {"directory": str(tmp_path / "checkpoints"), "every": 1}
    host = prepared_processes.PreparedProcess(
        command(tmp_path, manifest(checkpoint=checkpoint)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    read_until(host, 1)
    host.send_signal(signal.SIGINT)
    output, _ = host.communicate(timeout=120)
    assert host.returncode == 130, output
    assert "to resume from the newest checkpoint" in output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["completed"] is False and len(report["iterations"]) >= 1
