"""What other tests of the API level do not show of the testbed: how it ends."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from testbed import wait_for

pytestmark = pytest.mark.cluster


def test_nothing_outlives_a_test_run_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from testbed.controlplane import ControlPlane
        plane = ControlPlane(Path(sys.argv[1]))
        plane.start()
        print(*[process.pid for process in plane.processes], flush=True)
        time.sleep(600)
        """
    )
    here = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(here)},
        text=True,
    )
    with child, child.stdout:
        pids = [int(word) for word in child.stdout.readline().split()]
        assert len(pids) == 3
        child.send_signal(signal.SIGKILL)
    wait_for("the end of the control plane", lambda: not any(map(exists, pids)), 60.0)


def exists(pid: int) -> bool:
    """Whether a process runs: one that ended but that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter: while it was read
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
