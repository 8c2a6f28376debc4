"""Pair of guests, the cables between them, and what can go wrong with those.

a ── control (eth0, 10.77.0.1/2) ── b      TCP: control connections and the fallback
a ── rail 0  (eth1, 10.77.1.1/2) ── b      Soft-RoCE rxe0
a ── rail 1  (eth2, 10.77.2.1/2) ── b      Soft-RoCE rxe1
"""

import ipaddress
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from testbed.waiting import wait_for

from guests.guest import Guest, Nic
from guests.kernel import Kernel, kernel

AGENT = Path(__file__).with_name("agent.py")
ROCE_PORT = 4791
_NICS = range(3)
# Without crc32 `rdma link add` fails with "No such file".
_MODULES = (
    "crc32_generic", "ib_core", "ib_uverbs", "rdma_rxe", "sch_netem", "sch_ingress", "cls_u32",
    "act_gact", "ipv6",
)  # fmt: skip


@dataclass(frozen=True)
class Rail:
    """RDMA device of one guest and the cable it is plugged into."""

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
        """Read one of rxe's counters, such as link_downed or completer_retry_err."""
        path = f"/sys/class/infiniband/{self.device}/ports/1/hw_counters/{name}"
        return int(self.guest.read(path))

    def unplug(self) -> None:
        self.guest.run("ip", "link", "set", self.netdev, "down")

    def plug(self) -> None:
        self.guest.sh(self.plugging())

    def plugging(self) -> str:
        """Shell command in the guest for it."""
        # Large frames: RoCE then uses packets of 4096 bytes, which emulated machines carry faster.
        return (
            f"ip link set {self.netdev} mtu 9000 up; "
            f"ip address replace {self.address}/24 dev {self.netdev}"
        )

    def pull_cable(self) -> None:
        """Pull the cable out of the card: its port is down, the device above it stays up."""
        self.guest.carrier(self.number + 1, False)

    def push_cable(self) -> None:
        self.guest.carrier(self.number + 1, True)

    def link_state(self) -> str:
        """State of the network device in the kernel: whether it is to be up, and whether it is."""
        said = self.guest.run("ip", "-j", "link", "show", self.netdev)
        flags = json.loads(said)[0]["flags"]
        return " ".join(flag for flag in ("UP", "LOWER_UP", "NO-CARRIER") if flag in flags)

    def drop_incoming(self) -> None:
        """Lose every RoCE packet that comes in here; the cable and TCP stay as they are.

        Not on its way out of the other end: rxe takes that for a full queue and tries again at
        once, for ever, which starves the guest.
        """
        self.guest.sh(
            f"tc qdisc replace dev {self.netdev} clsact; "
            f"tc filter add dev {self.netdev} ingress protocol ip u32 "
            f"match ip protocol 17 0xff match ip dport {ROCE_PORT} 0xffff action drop"
        )

    def dropped(self) -> int:
        """Packets lost by :meth:`drop_incoming` so far."""
        return self._filtered()[1]

    def watch_incoming(
        self, *, traffic_class: int | None = None, source: str | None = None
    ) -> None:
        """Count the RoCE packets that come in here with this traffic class, which over IPv4 is the
        whole of the second byte of the header (DSCP and ECN), or from this address."""
        what = "" if traffic_class is None else f"match ip dsfield {traffic_class:#x} 0xff "
        what += "" if source is None else f"match ip src {source} "
        self.guest.sh(
            f"tc qdisc replace dev {self.netdev} clsact; "
            f"tc filter add dev {self.netdev} ingress protocol ip u32 "
            f"match ip protocol 17 0xff match ip dport {ROCE_PORT} 0xffff {what}action pass"
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
        """Limit the rate of outgoing packets, e.g. to 20mbit."""
        self.guest.run("tc", "qdisc", "replace", "dev", self.netdev, "root", "netem", "rate", rate)

    def at_full_speed(self) -> None:
        self.guest.run("tc", "qdisc", "del", "dev", self.netdev, "root")

    def gids(self) -> dict[int, str]:
        """Valid entries of the GID table, by index, in order. The kernel renews it in the
        background when addresses change."""
        folder = f"/sys/class/infiniband/{self.device}/ports/1/gids"
        said = {index: self.guest.read(f"{folder}/{index}").strip() for index in range(8)}
        return {index: gid for index, gid in said.items() if gid.strip("0:")}

    def addresses_of_gids(self) -> set[str]:
        """The IPv4 addresses in the GID table."""
        found = (ipaddress.IPv6Address(gid).ipv4_mapped for gid in self.gids().values())
        return {str(address) for address in found if address is not None}

    def until_addressed(self, address: str | None = None) -> None:
        """Wait until an address, its own one if none is given, is the only one of IPv4 among the
        GIDs, and the port is up: the kernel sees to both in the background."""
        wanted = address or self.address
        state = f"/sys/class/infiniband/{self.device}/ports/1/state"

        def there() -> bool:
            return (
                self.addresses_of_gids() == {wanted} and "ACTIVE" in self.guest.read(state).split()
            )

        wait_for(
            f"{wanted} to be the address of {self.device} in guest {self.guest.name}",
            there,
            60.0,
            interval=0.02,
            details=lambda: f"GIDs {self.gids()}, port {self.guest.read(state).strip()}",
        )


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
        """Restore the state after boot, whatever the last test did."""
        for rail in self.rails:
            rail.push_cable()
        for guest in (self.a, self.b):
            rails = [rail for rail in self.rails if rail.guest is guest]
            # A single shell: to start a program takes long on an emulated processor.
            guest.sh(
                "\n".join(
                    [
                        *(
                            f"tc qdisc del dev eth{n} {kind} 2>/dev/null || :"
                            for n in _NICS
                            for kind in ("clsact", "root")
                        ),
                        *(
                            f"ip -4 address flush dev {rail.netdev}; {rail.plugging()}"
                            for rail in rails
                        ),
                    ]
                )
            )
        for rail in self.rails:
            rail.until_addressed()

    @property
    def running(self) -> bool:
        """True if both machines run: a guest whose kernel panics ends."""
        return self.a.process.running and self.b.process.running

    def logs(self) -> str:
        return "\n".join(f"guest {g.name}:\n{g.logs()}" for g in (self.a, self.b))

    @classmethod
    @contextmanager
    def started(cls) -> Iterator["Fabric"]:
        with ExitStack() as stack:
            # Short: a unix socket's path has at most 107 characters.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pmg")))
            from_host = kernel(f"{sys.executable} {AGENT}")
            stack.callback(from_host.ramdisk.unlink)
            guests = [
                Guest(name, directory, from_host, list(_nics(directory, name))) for name in "ab"
            ]
            for guest in guests:
                stack.callback(guest.stop)
                guest.start()
                # The second one connects once, when it starts, and reports no failure.
                wait_for(
                    f"guest {guest.name} to hold its cables",
                    lambda: all(_is_listened_on(_cable(directory, n)) for n in _NICS),
                    60,
                    details=guest.logs,
                )
            for guest in guests:
                guest.wait_ready()
            fabric = cls(*guests)
            with ThreadPoolExecutor() as both:
                for done in [both.submit(_set_up, guest, from_host) for guest in guests]:
                    done.result()
            for rail in fabric.rails:
                rail.until_addressed()
            for number in _NICS:
                _check_cable(guests[0], f"10.77.{number}.2")
            yield fabric


def _cable(directory: Path, number: int) -> Path:
    return directory / f"n{number}"


def _is_listened_on(path: Path) -> bool:
    """A unix socket has its path a moment before anybody can connect to it."""
    accepts_connections = 0x10000
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    found = (line.split() for line in lines)
    return any(f[-1] == str(path) and int(f[3], 16) & accepts_connections for f in found)


def _nics(directory: Path, name: str) -> Iterator[Nic]:
    for number in _NICS:
        side = 1 if name == "a" else 2
        yield Nic(_cable(directory, number), name == "a", f"52:54:00:77:{number:02x}:{side:02x}")


def _set_up(guest: Guest, from_host: Kernel) -> None:
    modprobe = f"modprobe -d {shlex.quote(str(from_host.root))}"
    rails = [Rail(guest, number) for number in (0, 1)]
    # A single shell: to start a program takes long on an emulated processor.
    guest.sh(
        "\n".join(
            [
                # Some kernels have a few of them built in.
                *(f"{modprobe} {module} || :" for module in _MODULES),
                f"{modprobe} virtio_net",
                # The trainer tells hosts apart by their names.
                f"echo {guest.name} > /proc/sys/kernel/hostname",
                "ip link set eth0 up",
                f"ip address add {Fabric.CONTROL[guest.name]}/24 dev eth0",
                *(rail.plugging() for rail in rails),
                *(f"rdma link add {r.device} type rxe netdev {r.netdev}" for r in rails),
            ]
        ),
        deadline=120.0,
    )


def _check_cable(guest: Guest, address: str) -> None:
    ping = ("busybox", "ping", "-c", "1", "-W", "1", address)
    wait_for(
        f"guest {guest.name} to reach {address}",
        lambda: guest.try_run(*ping).rc == 0,
        60,
        details=lambda: guest.sh("ip neighbour; ip -s link"),
    )
