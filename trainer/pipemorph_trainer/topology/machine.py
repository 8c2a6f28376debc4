"""Identifies the machine of a rank: whether two ranks share a clock, and 127.0.0.1.

The host name is not enough: cloned machines and containers may have the same one. Ranks share a
clock if they run on the same kernel, and the loopback device if they are also in the same network
namespace.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple


class Machine(NamedTuple):
    """Identity of a rank's machine, made by :func:`this_machine`."""

    hostname: str
    boot_id: str
    """Of the running kernel, see proc_sys_kernel(5); empty if unavailable."""
    network: str
    """The network namespace, see namespaces(7); empty if unavailable."""

    def shares_clock(self, other: Machine) -> bool:
        """Whether times of the two ranks can be compared."""
        return self[:2] == other[:2]

    def shares_loopback(self, other: Machine) -> bool:
        """Whether one rank can connect to the other at 127.0.0.1."""
        return self == other


def this_machine(proc: Path = Path("/proc")) -> Machine:
    """The machine of this process. Values that the system does not provide are empty."""
    try:
        boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    try:
        network = str((proc / "self/ns/net").readlink())
    except OSError:
        network = ""
    return Machine(socket.gethostname(), boot_id, network)
