"""The script of `make kind` on a real kubelet with containerd. It installs the chart itself; images
are loaded as `kind load` would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from node_support import ROOT, SYSTEM
from testbed import tools
from testbed.node_cluster import NodeCluster

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]


def test_the_first_job_adapts(
    node_cluster: NodeCluster, project_archives: dict[str, Path], tmp_path: Path
) -> None:
    for archive in project_archives.values():
        node_cluster.import_image(archive)
    for program in ("kubectl", "helm"):
        (tmp_path / program).symlink_to(tools.find(program))
    script = [sys.executable, str(ROOT / "examples/kubernetes/first_job.py"), "--loaded"]
    try:
        done = subprocess.run(
            [*script, "--kubeconfig", str(node_cluster.admin)],
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        last = done.stdout.splitlines()[-1]
        assert last.startswith("one-link has adapted, ") and "plan v" in last
    finally:
        node_cluster.helm("uninstall", "pipemorph", "--namespace", SYSTEM, "--ignore-not-found")
        node_cluster.client.delete("crds", "pipemorphjobs.pipemorph.io")
        node_cluster.client.delete("namespaces", SYSTEM)
        for archive in project_archives.values():
            node_cluster.archives.remove(archive)
