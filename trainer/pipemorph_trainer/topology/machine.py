"""Which machine a rank is on: which clock it reads, and whose 127.0.0.1 is its own.

A host name alone does not tell: cloned machines and containers may share one. Ranks read one
clock where they run on one kernel, and one loopback where they are in one of its network
namespaces too.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple


class Machine(NamedTuple):
    """What a rank says of where it is. Comes from :func:`this_machine`."""

    hostname: str
    boot_id: str
    """Of the running kernel, as in proc_sys_kernel(5); empty where there is none."""
    network: str
    """The network namespace, as in namespaces(7); empty where there is none."""

    def shares_clock(self, other: Machine) -> bool:
        """Whether a time read there means the same here."""
        return self[:2] == other[:2]

    def shares_loopback(self, other: Machine) -> bool:
        """Whether what listens at 127.0.0.1 there can be dialled here."""
        return self == other


def this_machine(proc: Path = Path("/proc")) -> Machine:
    """Where this process is. What the system does not tell stays empty, and does not count."""
    try:
        boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    try:
        network = str((proc / "self/ns/net").readlink())
    except OSError:
        network = ""
    return Machine(socket.gethostname(), boot_id, network)
