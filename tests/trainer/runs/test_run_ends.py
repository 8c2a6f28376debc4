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
from test_run import command, manifest

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


def read_until(host: subprocess.Popen[str], iteration: int) -> str:
    """What a run says until ``iteration`` or a later one is over: not each has a line."""
    assert host.stdout is not None
    said = ""
    for line in host.stdout:
        said += line
        told = re.search(r"iteration (\d+) of", line)
        if told is not None and int(told[1]) >= iteration:
            return said
    raise AssertionError(f"the run ended before iteration {iteration}:\n{said}")


def rank_of(host: int, rank: int) -> int:
    """The process id of a rank of that host."""
    return next(
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_rank(int(entry.name), host, rank)
    )


def _is_rank(pid: int, host: int, rank: int) -> bool:
    """Whether a process is that rank of that host (and not something the rank started)."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False
    return name == f"rank-{rank}" and parent == host
