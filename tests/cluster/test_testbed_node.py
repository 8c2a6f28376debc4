"""Leftovers of the testbed, which other tests on nodes do not check."""

import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from testbed import wait_for
from testbed.machine import CGROUP_PREFIX, cgroup_roots, remove_leftovers

pytestmark = pytest.mark.node


@pytest.mark.usefixtures("node_cluster")  # only where there may be one
def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from testbed.node_cluster import NodeCluster
        with NodeCluster.started(Path(sys.argv[1])) as nodes:
            print(nodes.bridge, flush=True)
            time.sleep(600)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        text=True,
    )
    with child, child.stdout:
        bridge = child.stdout.readline().strip()
        assert mentioning(tmp_path) and Path("/sys/class/net", bridge).exists()
        child.kill()
    wait_for(
        "the end of the node's programs",
        lambda: not mentioning(tmp_path),
        60.0,
        details=lambda: f"found {mentioning(tmp_path)}",
    )
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    remove_leftovers()
    assert not [*Path("/sys/class/net").glob(f"{bridge}*")]
    # Top level only: other cgroups of the machine come and go during a walk.
    ours = f"{CGROUP_PREFIX}{child.pid}-*"
    assert not [folder for root in cgroup_roots() for folder in root.glob(ours)]


def mentioning(folder: Path) -> list[str]:
    """The processes that were started with something in a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):  # it has just ended
            command = (process / "cmdline").read_text(errors="replace")
            if str(folder) in command:
                found.append(command)
    return found
