"""Addresses of machines, IPv4 or IPv6, and the identity of a rank's machine.

Ranks share a clock if they run on the same kernel, and the loopback device (127.0.0.1) if they are
also in the same network namespace. A host name does not show that: cloned machines and containers
may have the same name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from pipemorph_trainer.errors import PipelineError


def find_own_address(master_addr: str) -> str:
    """Find the address with which this machine reaches rank 0: IPv4 if both have it, else IPv6.

    Raises :class:`PipelineError` if there is no route to rank 0's machine.
    """
    why = []
    for family, scheme in ((socket.AF_INET, "IPv4"), (socket.AF_INET6, "IPv6")):
        try:
            # Nothing is sent to the reserved port 9: a datagram socket only looks up the route.
            _, _, _, _, there = socket.getaddrinfo(master_addr, 9, family, socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)
                return str(probe.getsockname()[0])
        except OSError as error:
            why.append(f"{scheme}: {error.strerror}")
    raise PipelineError(
        f"MASTER_ADDR is {master_addr}, which cannot be reached over {', nor over '.join(why)}"
    )


def find_reachable_address(address: str, peers: Iterable[str] = ()) -> str:
    """Find the address by which other machines reach this one: ``address``, unless it is a loopback
    address (``/etc/hosts`` may map a machine's own name to 127.0.1.1). Then it is the source
    address of the route to the first of ``peers`` on another machine, else of the default route.

    Raises :class:`PipelineError` if there is neither.
    """
    if not _is_loopback(address):
        return address
    remote = [peer for peer in peers if not _is_loopback(peer)]
    # Addresses reserved for documentation: no host has them, so the default route leads to them.
    default = ["192.0.2.1", "2001:db8::1"]
    if ":" in address:
        default.reverse()
    for there in [*remote, *default]:
        family = socket.AF_INET6 if ":" in there else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((there, 9))
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        if not _is_loopback(found):
            return found
    raise PipelineError(
        f"MASTER_ADDR leads to {address} on this machine, an address that other machines cannot "
        "reach, and no route leads to them: name rank 0's machine by an address of its network "
        "(see /etc/hosts)"
    )


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def get_wildcard_address(address: str) -> str:
    """Return the wildcard address to listen on for peers that dial ``address`` or its kind."""
    return "::" if ":" in address else "0.0.0.0"


def format_for_url(address: str) -> str:
    """Format ``address`` for a URL, before a colon and a port."""
    return f"[{address}]" if ":" in address else address


def is_loopback(address: str) -> bool:
    """True if ``address`` is a literal loopback address or ``localhost``. False for other names
    that resolve to one: on other machines they may resolve to addresses that those reach."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class Machine(NamedTuple):
    """Identity of a rank's machine, made by :func:`identify_machine`."""

    hostname: str
    boot_id: str
    """Identifier of the running kernel, see proc_sys_kernel(5); empty if unavailable."""
    network: str
    """Network namespace, see namespaces(7); empty if unavailable."""

    def shares_clock(self, other: Machine) -> bool:
        """True if times of the two ranks can be compared."""
        return self[:2] == other[:2]

    def shares_loopback(self, other: Machine) -> bool:
        """True if the ranks can connect to each other at 127.0.0.1."""
        return self == other


def identify_machine(proc: Path = Path("/proc")) -> Machine:
    """Identify the machine of this process. Values that the system does not provide are empty."""
    try:
        boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    try:
        network = str((proc / "self/ns/net").readlink())
    except OSError:
        network = ""
    return Machine(socket.gethostname(), boot_id, network)
