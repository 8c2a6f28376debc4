"""Two guests, the cables between them, and what can go wrong with those.

a ── control (eth0, 10.77.0.1/2) ── b      TCP: control connections and the fallback
a ── rail 0  (eth1, 10.77.1.1/2) ── b      Soft-RoCE rxe0
a ── rail 1  (eth2, 10.77.2.1/2) ── b      Soft-RoCE rxe1
"""

import ipaddress
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from testbed.waiting import wait_for

from guests.guest import Guest, Nic
from guests.kernel import Kernel, Say, kernel

AGENT = Path(__file__).with_name("agent.py")
ROCE_PORT = 4791
# The operation of a reliable connection's acknowledgement (InfiniBand specification, 9.2.1).
ACKNOWLEDGE = 0x11
_NICS = range(3)
# Without crc32 `rdma link add` fails with "No such file".
_MODULES = (
    "crc32_generic", "ib_core", "ib_uverbs", "rdma_rxe", "sch_netem", "sch_ingress", "cls_u32",
    "act_gact", "ipv6",
)  # fmt: skip


@dataclass(frozen=True)
class Rail:
    """One RDMA device of one guest and the cable it is plugged into."""

    guest: Guest
    number: int

    @property
    def netdev(self) -> str:
        return f"eth{self.number + 1}"

    @property
    def device(self) -> str:
        return f"rxe{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.{self.number + 1}.{1 if self.guest.name == 'a' else 2}"

    def counter(self, name: str) -> int:
        """One of rxe's counters, such as link_downed or completer_retry_err."""
        path = f"/sys/class/infiniband/{self.device}/ports/1/hw_counters/{name}"
        return int(self.guest.read(path))

    def unplug(self) -> None:
        self.guest.run("ip", "link", "set", self.netdev, "down")

    def unplug_in_mid_chunk(self, packets: int = 32) -> None:
        """As soon as this many packets wait to leave a slow rail, which the guest sees for itself:
        asking it from outside takes as long as sending a chunk."""
        self.guest.sh(
            f"until tc -s qdisc show dev {self.netdev} root | "
            f"awk '/backlog/ {{n = $3 + 0}} END {{exit n < {packets}}}'; do :; done; "
            f"ip link set {self.netdev} down",
            deadline=60.0,
        )

    def plug(self) -> None:
        # Large frames: RoCE then uses packets of 4096 bytes, which emulated machines carry faster.
        self.guest.run("ip", "link", "set", self.netdev, "mtu", "9000", "up")
        self.guest.run("ip", "address", "replace", f"{self.address}/24", "dev", self.netdev)

    def pull_cable(self) -> None:
        """Out of the card: its port is down, and the device above it up, as it was."""
        self.guest.carrier(self.number + 1, False)

    def push_cable(self) -> None:
        self.guest.carrier(self.number + 1, True)

    def link_state(self) -> str:
        """What the kernel says of the network device: whether it is to be up, and whether it is."""
        said = self.guest.run("ip", "-j", "link", "show", self.netdev)
        flags = json.loads(said)[0]["flags"]
        return " ".join(flag for flag in ("UP", "LOWER_UP", "NO-CARRIER") if flag in flags)

    def drop_incoming(self, *, only_acknowledgements: bool = False) -> None:
        """Lose every RoCE packet that comes in here; the cable and TCP stay as they are.

        Not on its way out of the other end: rxe takes that for a full queue and tries again at
        once, for ever, which starves the guest.
        """
        # The first byte of the payload is the operation; 20 bytes of IPv4 and 8 of UDP before it.
        what = f"match u8 {ACKNOWLEDGE:#x} 0xff at 28 " if only_acknowledgements else ""
        self.guest.sh(
            f"tc qdisc replace dev {self.netdev} clsact; "
            f"tc filter add dev {self.netdev} ingress protocol ip u32 "
            f"match ip protocol 17 0xff match ip dport {ROCE_PORT} 0xffff {what}action drop"
        )

    def dropped(self) -> int:
        """Packets lost by :meth:`drop_incoming` so far."""
        return self._filtered()[1]

    def watch_incoming(self, *, traffic_class: int) -> None:
        """Count the RoCE packets that come in here with this traffic class, which over IPv4 is the
        whole of the second byte of the header (DSCP and ECN)."""
        self.guest.sh(
            f"tc qdisc replace dev {self.netdev} clsact; "
            f"tc filter add dev {self.netdev} ingress protocol ip u32 "
            f"match ip protocol 17 0xff match ip dport {ROCE_PORT} 0xffff "
            f"match ip dsfield {traffic_class:#x} 0xff action pass"
        )

    def watched(self) -> int:
        """Packets counted by :meth:`watch_incoming` so far."""
        return self._filtered()[0]

    def _filtered(self) -> tuple[int, int]:
        """Packets that the filter for incoming ones has taken, and how many of them it dropped."""
        said = self.guest.run("tc", "-s", "filter", "show", "dev", self.netdev, "ingress")
        found = re.search(r"Sent \d+ bytes (\d+) pkt \(dropped (\d+)", said)
        assert found is not None, said
        return int(found.group(1)), int(found.group(2))

    def deliver_again(self) -> None:
        self.guest.run("tc", "qdisc", "del", "dev", self.netdev, "clsact")

    def slow(self, rate: str) -> None:
        """Limit what leaves here, e.g. to 20mbit."""
        self.guest.run("tc", "qdisc", "replace", "dev", self.netdev, "root", "netem", "rate", rate)

    def at_full_speed(self) -> None:
        self.guest.run("tc", "qdisc", "del", "dev", self.netdev, "root")

    def gids(self) -> list[str]:
        """Valid entries of the GID table, in order. The kernel renews it in the background when
        addresses change."""
        folder = f"/sys/class/infiniband/{self.device}/ports/1/gids"
        said = self.guest.sh(f"for i in 0 1 2 3 4 5 6 7; do cat {folder}/$i; done")
        return [gid for gid in said.split() if gid.strip("0:")]

    def addresses_of_gids(self) -> set[str]:
        """The IPv4 addresses in the GID table."""
        found = (ipaddress.IPv6Address(gid).ipv4_mapped for gid in self.gids())
        return {str(address) for address in found if address is not None}


@dataclass(frozen=True)
class Fabric:
    a: Guest
    b: Guest

    CONTROL: ClassVar = {"a": "10.77.0.1", "b": "10.77.0.2"}

    def rail(self, guest: Guest, number: int) -> Rail:
        return Rail(guest, number)

    @property
    def rails(self) -> list[Rail]:
        return [Rail(guest, number) for number in (0, 1) for guest in (self.a, self.b)]

    def restore(self) -> None:
        """As it was when it came up, whatever the last test did."""
        for guest in (self.a, self.b):
            for n in _NICS:
                guest.try_run("tc", "qdisc", "del", "dev", f"eth{n}", "clsact")
                guest.try_run("tc", "qdisc", "del", "dev", f"eth{n}", "root")
        for rail in self.rails:
            rail.push_cable()
            rail.guest.run("ip", "-4", "address", "flush", "dev", rail.netdev)
            rail.plug()

    def logs(self) -> str:
        return "\n".join(f"guest {g.name}:\n{g.logs()}" for g in (self.a, self.b))

    @classmethod
    @contextmanager
    def started(cls, say: Say) -> Iterator["Fabric"]:
        with ExitStack() as stack:
            # Short: a unix socket's path has at most 107 characters.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pmg")))
            from_host = kernel(say, f"{sys.executable} {AGENT}")
            stack.callback(from_host.ramdisk.unlink)
            guests = [
                Guest(name, directory, from_host, list(_nics(directory, name))) for name in "ab"
            ]
            for guest in guests:
                stack.callback(guest.stop)
                guest.start()
                # The second one connects once, when it starts, and does not say if it cannot.
                wait_for(
                    "the cables", lambda: all(_cable(directory, n).exists() for n in _NICS), 20
                )
            for guest in guests:
                guest.wait_ready()
            fabric = cls(*guests)
            for guest in guests:
                _set_up(guest, from_host)
            for number in _NICS:
                _check_cable(guests[0], f"10.77.{number}.2")
            yield fabric


def _cable(directory: Path, number: int) -> Path:
    return directory / f"n{number}"


def _nics(directory: Path, name: str) -> Iterator[Nic]:
    for number in _NICS:
        side = 1 if name == "a" else 2
        yield Nic(_cable(directory, number), name == "a", f"52:54:00:77:{number:02x}:{side:02x}")


def _set_up(guest: Guest, from_host: Kernel) -> None:
    for module in _MODULES:
        guest.try_run("modprobe", "-d", str(from_host.root), module)
    guest.run("modprobe", "-d", str(from_host.root), "virtio_net")
    # The trainer tells hosts apart by their names.
    guest.sh(f"echo {guest.name} > /proc/sys/kernel/hostname")
    guest.run("ip", "link", "set", "eth0", "up")
    guest.run("ip", "address", "add", f"{Fabric.CONTROL[guest.name]}/24", "dev", "eth0")
    for number in (0, 1):
        rail = Rail(guest, number)
        rail.plug()
        guest.run("rdma", "link", "add", rail.device, "type", "rxe", "netdev", rail.netdev)


def _check_cable(guest: Guest, address: str) -> None:
    ping = ("busybox", "ping", "-c", "1", "-W", "1", address)
    wait_for(
        f"guest {guest.name} to reach {address}",
        lambda: guest.try_run(*ping).rc == 0,
        20,
        details=lambda: guest.sh("ip neighbour; ip -s link"),
    )
