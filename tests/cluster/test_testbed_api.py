"""What other tests of the API level do not show of the testbed: its messages and ends."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from testbed import Cluster, TestbedError, wait_for
from testbed.api import Object

pytestmark = pytest.mark.cluster


def indexed_job(name: str, completions: int) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": completions,
            "parallelism": completions,
            "completionMode": "Indexed",
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "schedulerName": "nobody",
                    "containers": [{"name": "main", "image": "none.invalid/none"}],
                }
            },
        },
    }


def test_a_missed_deadline_says_what_was_found(cluster: Cluster, namespace: str) -> None:
    cluster.apply(indexed_job("never", 1), f"--namespace={namespace}")
    # What the message must tell, since each is written by itself: the pod, then these.
    cluster.wait("jobs", "never", lambda job: job["status"].get("active") == 1, namespace=namespace)
    wait_for(
        "the event of its pod",
        lambda: "SuccessfulCreate" in cluster.events("jobs", "never", namespace),
        60.0,
    )
    with pytest.raises(TestbedError) as missed:
        cluster.wait("jobs", "never", "Complete", 0.5, namespace=namespace)
    for part in ("Complete of jobs never", "last status", '"active": 1', "SuccessfulCreate"):
        assert part in str(missed.value)


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
    assert child.stdout is not None
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
