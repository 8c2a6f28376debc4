"""One host of a check: its rails, and what it is asked to do with them.

The host that leads the check talks to itself and to the others by the same requests, those of
:mod:`pipemorph.fabric.check.verbs_probe` and:

======== ===================== ===============================================
op       needs                 result
======== ===================== ===============================================
describe                       rails: each as :class:`Rail`
resent   device, port          count: packets that the port has sent again, of
                               all connections; None if sysfs does not say
end                            nothing; the other end has no more requests
======== ===================== ===============================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipemorph.discovery import rdma
from pipemorph.errors import InputError
from pipemorph.fabric.check.probe import Probe, ProbeFailed
from pipemorph.fabric.check.rendezvous import IDLE_SECONDS, Channel, RendezvousError
from pipemorph.fabric.check.verdict import Rail

RESENT = ("completer_retry_err", "local_ack_timeout_err", "packet_seq_err", "roce_adp_retrans")
"""Counters of the sending port: of rxe the first one, of mlx5 the others."""

DEVICE = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,62}"


class Host:
    """This host. Raises :class:`InputError` without pyverbs, or without a named device."""

    def __init__(
        self,
        devices: Sequence[str] = (),
        gid_index: int | None = None,
        sysfs: Path = rdma.SYSFS,
    ) -> None:
        self._sysfs, self._devices, self._gid_index = sysfs, devices, gid_index
        self._probe = Probe()
        try:
            self.rails()
        except BaseException:
            self.close()
            raise

    def rails(self) -> list[Rail]:
        """The ports that take part."""
        try:
            mtus = self._probe.ask({"op": "ports"})["ports"]
        except ProbeFailed:
            # pyverbs raises where the kernel has no RDMA.
            mtus = {}
        ports = rdma.ports(rdma.devices(self._sysfs))
        found = [
            self._rail(port, mtus.get(str(port), {}).get("mtu"))
            for port in ports
            if not self._devices or {port.device, f"{port.device}:{port.number}"} & {*self._devices}
        ]
        for name in self._devices:
            if not any(name in (r.device, f"{r.device}:{r.port}") for r in found):
                there = ", ".join(f"{port.device}:{port.number}" for port in ports) or "none"
                raise InputError(f"there is no RDMA device {name} (found {there})")
        return found

    def _rail(self, port: rdma.Port, mtu: int | None) -> Rail:
        gids = [g for g in port.gids if self._gid_index in (None, g.index)]
        gid = gids[0] if gids else None
        chosen = self._gid_index is not None and port.active
        return Rail(
            device=port.device,
            port=port.number,
            state=port.state or "unavailable",
            active=gid is not None and (port.usable or chosen),
            rate=port.rate,
            gid=gid.address if gid else None,
            gid_index=gid.index if gid else None,
            mtu=mtu,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("op"):
            case "describe":
                return {"rails": [asdict(rail) for rail in self.rails()]}
            case "resent":
                device, port = str(request["device"]), int(request["port"])
                if not re.fullmatch(DEVICE, device):
                    raise ProbeFailed(f"{device!r} is not a device")
                counters = rdma.read_counters(self._sysfs / device / "ports" / str(port))
                known = [n for name in RESENT if (n := counters.get(name)) is not None]
                return {"count": sum(known) if known else None}
        return self._probe.ask(request)

    def serve(self, channel: Channel) -> bool:
        """Carry out what comes over a channel. True: the other end said that this is all."""
        try:
            while True:
                request = channel.hear(IDLE_SECONDS)
                if request.get("op") == "end":
                    channel.say({})
                    return True
                try:
                    said = self.ask(request)
                except (ProbeFailed, InputError) as error:
                    said = {"error": str(error)}
                except (KeyError, TypeError, ValueError) as error:
                    said = {"error": f"not a request of this protocol: {error!r}"}
                channel.say(said)
        except RendezvousError:
            return False

    def close(self) -> None:
        self._probe.close()
