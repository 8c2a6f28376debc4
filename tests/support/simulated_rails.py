"""Hosts whose RDMA devices are arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipemorph.fabric.hosts import FabricHost, FabricRail, connect_host
from pipemorph.fabric.json_process import ProbeError


def rail(number: int, host: int, **changes: Any) -> FabricRail:
    made = FabricRail(
        device=f"mlx5_{number}",
        port=1,
        state="ACTIVE",
        active=True,
        rate="100 Gb/sec (4X EDR)",
        gid=f"::ffff:10.0.{number}.{host + 1}",
        gid_index=3,
        mtu=4096,
    )
    return replace(made, **changes)


@dataclass
class Way:
    """Properties of a direction."""

    rate: float = 12e9
    round_trip: float = 4e-6
    mtu: int = 4096
    refuses: str = ""


@dataclass
class Plant:
    """Hosts whose devices are arithmetic. ``ways``: by source and target, each (host, device)."""

    hosts: int = 3
    rails: int = 2
    ways: dict[tuple[tuple[str, str], tuple[str, str]], Way] = field(default_factory=dict)
    open: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        self._peers: dict[str, tuple[str, str]] = {}

    def all_hosts(self) -> list[FabricHost]:
        def made(number: int) -> FabricHost:
            rails = [asdict(rail(n, number)) for n in range(self.rails)]

            def send(request: dict[str, Any]) -> dict[str, Any]:
                if request["op"] == "describe":
                    return {"rails": rails}
                return self.carry_out(f"h{number}", request)

            return connect_host(f"h{number}", send)

        return [made(number) for number in range(self.hosts)]

    def carry_out(self, host: str, request: dict[str, Any]) -> dict[str, Any]:
        op, own = request["op"], (host, request.get("id", 0))
        if op == "open":
            number = next(self._ids)
            self.open[host, number] = request
            self._peers[f"{number}"] = (host, request["device"])
            return {"id": number, "qpn": f"{number}"}
        if op == "join":
            self.open[own] |= {"mtu": request["mtu"], "peer": self._peers[request["peer"]["qpn"]]}
            return {}
        if op == "close":
            del self.open[own]
            return {}
        assert op == "write"
        here, there = (host, self.open[own]["device"]), self.open[own]["peer"]
        way = self.ways.get((here, there), Way())
        if way.refuses:
            raise ProbeError(way.refuses)
        if self.open[own]["mtu"] > way.mtu:
            return {"failed": "transport retry counter exceeded", "bytes": 0, "each": []}
        if request["window"] == 1:
            took = max(way.round_trip, request["bytes"] / way.rate)
            each = [took] * min(request["count"], 100)
            return {"bytes": request["bytes"] * len(each), "seconds": sum(each), "each": each}
        return {"bytes": way.rate * 0.5, "seconds": 0.5, "each": []}


def way(source: int, target: int, device: int = 0) -> tuple[tuple[str, str], tuple[str, str]]:
    return (f"h{source}", f"mlx5_{device}"), (f"h{target}", f"mlx5_{device}")
