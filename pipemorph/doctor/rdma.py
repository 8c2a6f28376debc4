"""Reads RDMA devices, their ports, GIDs and counters from sysfs.

Every pod with a device has sysfs; the active MTU, which it lacks, comes from pyverbs if that can be
imported. Unreadable values are None and shown as "unavailable", never as 0, which would look
healthy.

Sources: Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel; for RoCE address
types InfiniBand Architecture Specification, annexes A16 (RoCE) and A17 (RoCE v2).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipemorph.doctor import numa

SYSFS = Path("/sys/class/infiniband")

COUNTERS = (
    # counters/ (every driver): errors and pressure of the port itself
    *("symbol_error", "link_downed", "link_error_recovery", "local_link_integrity_errors"),
    *("port_rcv_errors", "port_xmit_discards", "port_xmit_wait"),
    # hw_counters/ of mlx5: retransmission, congestion, adaptive retransmission
    *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err"),
    *("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets", "roce_adp_retrans"),
    # hw_counters/ of rxe
    *("completer_retry_err", "retry_exceeded_err", "send_err"),
)
"""Counters that indicate link problems; which of them exist depends on the driver."""

GidKind = Literal["routable", "link-local"]


@dataclass(frozen=True)
class Gid:
    """Entry of a port's GID table."""

    index: int
    address: str
    """IPv6 notation; an IPv4 address of the interface reads ::ffff:a.b.c.d."""
    type: str | None
    """``RoCE v2``, ``IB/RoCE v1``; None if sysfs does not report it."""
    netdev: str | None

    @property
    def kind(self) -> GidKind:
        address = ipaddress.IPv6Address(self.address)
        mapped = address.ipv4_mapped
        return "link-local" if (mapped or address).is_link_local else "routable"

    @property
    def display_address(self) -> str:
        """The address in its usual notation, IPv4 if it is one."""
        address = ipaddress.IPv6Address(self.address)
        return str(address.ipv4_mapped or address)

    @property
    def sort_key(self) -> tuple[bool, bool, bool, bool, int]:
        """Sort key, best first: RoCE v2, with an interface, routable, IPv4, then by index.

        The order is the engine's (``best_gid`` of csrc/verbs/gid.hpp), so that jobs use the first.
        """
        return (
            self.type != "RoCE v2",
            self.netdev is None,
            self.kind != "routable",
            ipaddress.IPv6Address(self.address).ipv4_mapped is None,
            self.index,
        )


@dataclass(frozen=True)
class RdmaPort:
    """Port of a device, which a job may use as a rail."""

    device: str
    number: int
    state: str | None
    """ACTIVE, DOWN, INIT, ARMED, …"""
    physical_state: str | None
    """LinkUp, Polling, Disabled, …"""
    rate: str | None
    """Rate in sysfs notation, for example ``100 Gb/sec (4X EDR)``."""
    link_layer: str | None
    """``Ethernet`` (RoCE) or ``InfiniBand``."""
    gids: tuple[Gid, ...]
    """GIDs, best first: a job uses the first one, unless its spec names an index."""
    counters: dict[str, int | None] = field(hash=False)
    """The :data:`COUNTERS` that the driver has; None if unreadable."""
    active_mtu: int | None = None
    """Bytes; None without pyverbs."""

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def usable(self) -> bool:
        """True if a job can use it as a rail: active, and reachable from other hosts."""
        if not self.active:
            return False
        if self.link_layer == "InfiniBand":
            return True
        best = next(iter(self.gids), None)
        return best is not None and best.kind == "routable" and best.type == "RoCE v2"

    def __str__(self) -> str:
        return f"{self.device}/{self.number}"


@dataclass(frozen=True)
class RdmaDevice:
    """RDMA device (an HCA, a RoCE NIC, or Soft-RoCE over an interface)."""

    name: str
    pci: str | None
    """PCI address; None for a software device. Ports with the same address share a card."""
    ports: tuple[RdmaPort, ...]
    numa_node: int | None = None
    """None if unknown: a software device, or a host with one node."""


def read_devices(sysfs: Path = SYSFS) -> list[RdmaDevice] | None:
    """Devices of this host, sorted by name. None if the kernel has no InfiniBand support."""
    try:
        names = sorted(path.name for path in sysfs.iterdir())
    except OSError:
        return None
    return [_read_device(sysfs / name) for name in names]


def list_ports(found: Iterable[RdmaDevice] | None) -> list[RdmaPort]:
    """Ports of all devices, in their order."""
    return [port for device in found or () for port in device.ports]


def _read_device(folder: Path) -> RdmaDevice:
    pci = None
    if (folder / "device").exists():
        name = (folder / "device").resolve().name
        pci = name if name.count(":") == 2 else None
    numbers = _list_numbered_entries(folder / "ports")
    return RdmaDevice(
        name=folder.name,
        pci=pci,
        ports=tuple(_read_port(folder.name, n, folder / "ports" / str(n)) for n in numbers),
        numa_node=numa.read_numa_node(folder / "device"),
    )


def _read_port(device: str, number: int, folder: Path) -> RdmaPort:
    gids = [
        gid
        for i in _list_numbered_entries(folder / "gids")
        if (gid := _read_gid(folder, i)) is not None
    ]
    return RdmaPort(
        device=device,
        number=number,
        state=_strip_enum_number(_read_sysfs_line(folder / "state")),
        physical_state=_strip_enum_number(_read_sysfs_line(folder / "phys_state")),
        rate=_read_sysfs_line(folder / "rate") or None,
        link_layer=_read_sysfs_line(folder / "link_layer") or None,
        gids=tuple(sorted(gids, key=lambda gid: gid.sort_key)),
        counters=read_counters(folder),
    )


def _read_gid(folder: Path, index: int) -> Gid | None:
    """A GID table entry; None if unused. sysfs has a file for every possible entry."""
    address = _read_sysfs_line(folder / "gids" / str(index))
    try:
        parsed = ipaddress.IPv6Address(address or "::")
    except ValueError:
        return None
    interface_id = int(parsed) & ((1 << 64) - 1)
    if interface_id == 0:  # an unused entry: all zero, or the prefix alone
        return None
    return Gid(
        index=index,
        address=f"::ffff:{parsed.ipv4_mapped}" if parsed.ipv4_mapped else str(parsed),
        type=_read_sysfs_line(folder / "gid_attrs" / "types" / str(index)) or None,
        netdev=_read_sysfs_line(folder / "gid_attrs" / "ndevs" / str(index)) or None,
    )


def read_counters(port: Path) -> dict[str, int | None]:
    """The counters in a port's sysfs folder that the driver has; None if unreadable."""
    found: dict[str, int | None] = {}
    for name in COUNTERS:
        for group in ("counters", "hw_counters"):
            path = port / group / name
            if not path.exists():
                continue
            text = _read_sysfs_line(path)
            found[name] = int(text) if text is not None and text.isdecimal() else None
    return found


def _list_numbered_entries(folder: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except OSError:
        return []


def _read_sysfs_line(path: Path) -> str | None:
    """The line of a sysfs file. None if unreadable, such as an empty GID entry."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _strip_enum_number(text: str | None) -> str | None:
    """``"4: ACTIVE"`` → ``"ACTIVE"``."""
    return text.split(":", 1)[-1].strip() if text else None
