"""Users who may watch the jobs of a namespace, at a shell: kubectl, and pipemorph as its plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testbed import ApiError, NotYet, tools, wait_for
from testbed.api import ApiClient
from testbed.cluster import Cluster

DEADLINE = 120.0


def viewer(cluster: Cluster, namespace: str) -> Path:
    """A kubeconfig, with a certificate, of a user who may only view and watch the namespace."""
    name = f"watcher-of-{namespace}"
    who = [f"--user={name}", f"--namespace={namespace}"]
    cluster.kubectl("create", "rolebinding", "watcher", "--clusterrole=view", *who)
    for role, verb, resource in (
        ("read-pages", "get", "secrets"),
        ("forward-ports", "create", "pods/portforward"),
    ):
        rights = [f"--verb={verb}", f"--resource={resource}", f"--namespace={namespace}"]
        cluster.kubectl("create", "role", role, *rights)
        cluster.kubectl("create", "rolebinding", role, f"--role={role}", *who)
    kube = cluster.kubeconfig(name)
    client = ApiClient(kube)
    wait_for("the viewer's rights", lambda: may_list(client, namespace), DEADLINE)
    return kube


def may_list(client: ApiClient, namespace: str) -> bool:
    """The authorizer sees a new binding, and an aggregated role, when its watch delivers it."""
    try:
        client.list("pipemorphjobs", namespace)
    except ApiError as error:
        raise NotYet(str(error)) from None
    return True


class Shell:
    """Shell of a user with a kubeconfig, in a folder: kubectl and this release's programs."""

    def __init__(self, kube: Path, folder: Path) -> None:
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        if not (programs / "kubectl").exists():
            (programs / "kubectl").symlink_to(tools.find("kubectl"))
        # Not resolved: the environment's own programs are in the folder of its python.
        own = Path(sys.executable).parent
        self.folder = folder
        self.environment = {
            **os.environ,
            "KUBECONFIG": str(kube),
            "HOME": str(folder),
            "PATH": f"{programs}:{own}:{os.environ['PATH']}",
        }

    def run(self, line: str) -> str:
        """Output of a command; it fails with what the command complains of."""
        ran = subprocess.run(
            line.split(),
            env=self.environment,
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert (ran.returncode, ran.stderr) == (0, ""), f"{line}: {ran.stderr or ran.stdout}"
        return ran.stdout
