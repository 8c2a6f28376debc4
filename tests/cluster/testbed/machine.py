"""The machine that runs nodes: its requirements, and leftovers of a killed run."""

import json
import os
import re
import sys
from ipaddress import IPv4Network, ip_network
from pathlib import Path

from testbed.errors import TestbedError
from testbed.processes import output, run

BRIDGE_PREFIX = "pmtb"
CGROUP_PREFIX = "pipemorph-testbed-"
CGROUPS = Path("/sys/fs/cgroup")

# A program that nodes need, and the Debian package that brings it.
NODE_FILES = {
    "/usr/bin/containerd": "containerd",
    "/usr/bin/ctr": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/bin/busybox": "busybox-static",
    "/usr/sbin/iptables": "iptables",
    "/usr/sbin/conntrack": "conntrack",
    "/sbin/ip": "iproute2",
    "/usr/bin/nsenter": "util-linux",
    "/bin/mount": "mount",
    "/sbin/sysctl": "procps",
}


def unfit_for_nodes() -> str | None:
    """Reason that this machine cannot run pods, or None."""
    if sys.platform != "linux":
        return f"found {sys.platform}, and pods need Linux"
    if os.geteuid() != 0:
        return "found a user who is not root, and namespaces and cgroups need root"
    return None


def free_network() -> IPv4Network:
    """A /16 that no route of this machine touches: nodes in its first /24, pods in the others."""
    routes = json.loads(output(["ip", "-j", "-4", "route", "show", "table", "all"]))
    taken = [
        ip_network(route["dst"], strict=False)
        for route in routes
        if re.match(r"^[\d.]+(/\d+)?$", route["dst"])
    ]
    for second in range(240, 200, -1):
        network = IPv4Network(f"10.{second}.0.0/16")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise TestbedError("found a route into each of 10.201.0.0/16 to 10.240.0.0/16: free one")


def remove_leftovers() -> None:
    """Remove leftovers of a killed run: their names hold the process that made them."""
    for link in json.loads(output(["ip", "-j", "link", "show"])):
        found = re.fullmatch(BRIDGE_PREFIX + r"(\d+)(n\d+)?", link["ifname"])
        if found and not Path(f"/proc/{found.group(1)}").exists():
            run(["ip", "link", "delete", link["ifname"]])
    for root in cgroup_roots():
        for folder in root.glob(CGROUP_PREFIX + "*"):
            owner = folder.name.removeprefix(CGROUP_PREFIX).split("-")[0]
            if not Path(f"/proc/{owner}").exists():
                remove_cgroup(folder)


def bridge_name() -> str:
    """The name of this process's bridge; the links of its nodes are called after it."""
    return f"{BRIDGE_PREFIX}{os.getpid()}"


def cgroup_name(node: str) -> str:
    """The name of the cgroup of one of this process's nodes."""
    return f"{CGROUP_PREFIX}{os.getpid()}-{node}"


def cgroup_roots() -> list[Path]:
    """Folders in which cgroups are made: one, or under version 1 one per controller."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [root for root in CGROUPS.iterdir() if root.is_dir() and not root.is_symlink()]


def remove_cgroup(folder: Path) -> None:
    """Remove a cgroup and those in it, as far as they are empty."""
    for child in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        _try_rmdir(child)
    _try_rmdir(folder)


def _try_rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        # A process in it has been killed and is not gone yet; the next run tries again.
        pass
