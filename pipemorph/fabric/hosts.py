"""The hosts of a check: this one, and hosts that a remote shell reaches.

The leader sends all of them requests of :mod:`pipemorph.fabric.verbs_probe`, and ``describe``,
whose result has ``rails``.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipemorph.doctor import rdma
from pipemorph.errors import InputError
from pipemorph.fabric.json_process import JsonProcess, ProbeError

LOCALHOST = "localhost"
DESCRIBE = {"op": "describe"}
PROGRAM = Path(__file__).with_name("verbs_probe.py")
PYTHONS = (sys.executable, "/usr/bin/python3")
"""Pythons that may have pyverbs: this one, and the distribution's."""


@dataclass(frozen=True)
class FabricRail:
    """RDMA port of a host. ``active``: True if usable; ``gid``, ``gid_index``: its address, None
    without one; ``mtu``: active MTU, bytes, None if unknown; ``rate``: in sysfs notation."""

    device: str
    port: int
    state: str
    active: bool
    rate: str | None = None
    gid: str | None = None
    gid_index: int | None = None
    mtu: int | None = None

    @property
    def name(self) -> str:
        return f"{self.device}/{self.port}"


@dataclass(frozen=True)
class FabricHost:
    """Host of a check, for the leader. ``send_request``: carries out a request, or raises a
    :class:`ProbeError` that names the host."""

    name: str
    send_request: Callable[[dict[str, Any]], dict[str, Any]]
    rails: tuple[FabricRail, ...]


class LocalFabricHost:
    """Local end of a check. Raises :class:`InputError` without pyverbs or a named device."""

    def __init__(
        self, devices: Sequence[str] = (), gid_index: int | None = None, sysfs: Path = rdma.SYSFS
    ) -> None:
        self._sysfs, self._devices, self._gid_index = sysfs, devices, gid_index
        self._probe = start_probe()
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self.list_rails()
            on_error.pop_all()

    def list_rails(self) -> list[FabricRail]:
        """The ports to check."""
        try:
            mtus = self._probe.send_request({"op": "ports"})["ports"]
        except ProbeError:
            mtus = {}  # pyverbs raises where the kernel has no RDMA.
        ports = rdma.list_ports(rdma.read_devices(self._sysfs))
        found = [
            self._describe_rail(port, mtus.get(str(port)))
            for port in ports
            if not self._devices or {port.device, f"{port.device}:{port.number}"} & {*self._devices}
        ]
        for name in self._devices:
            if not any(name in (r.device, f"{r.device}:{r.port}") for r in found):
                there = ", ".join(f"{port.device}:{port.number}" for port in ports) or "none"
                raise InputError(f"there is no RDMA device {name} (found {there})")
        return found

    def _describe_rail(self, port: rdma.RdmaPort, mtu: int | None) -> FabricRail:
        gids = [g for g in port.gids if self._gid_index in (None, g.index)]
        gid = gids[0] if gids else None
        chosen = self._gid_index is not None and port.active
        return FabricRail(
            device=port.device,
            port=port.number,
            state=port.state or "unavailable",
            active=gid is not None and (port.usable or chosen),
            rate=port.rate,
            gid=gid.address if gid else None,
            gid_index=gid.index if gid else None,
            mtu=mtu,
        )

    def execute_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request. Raises :class:`ProbeError`."""
        if request == DESCRIBE:
            return {"rails": [asdict(rail) for rail in self.list_rails()]}
        return self._probe.send_request(request)

    def close(self) -> None:
        self._probe.close()


def start_probe(pythons: Sequence[str] = PYTHONS) -> JsonProcess:
    """Run the probe program. Raises :class:`InputError` if no Python here has pyverbs."""
    why = []
    for python in dict.fromkeys(pythons):
        try:
            # -I: the folder of the program and PYTHONPATH have nothing that it needs.
            return JsonProcess([python, "-I", str(PROGRAM)])
        except ProbeError as error:
            why.append(f"{python}: {error}")
    raise InputError(
        "no Python here has pyverbs; install the distribution's (Debian and Ubuntu: apt-get install"
        f" python3-pyverbs; Fedora: python3-pyverbs): {'; '.join(why)}"
    )


def serve_requests(make_host: Callable[[], LocalFabricHost]) -> int:
    """Carry out the requests on stdin until it ends. Returns an exit status."""
    try:
        host = make_host()
    except InputError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    with closing(host):
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            try:
                answer = host.execute_request(json.loads(line))
            except (ProbeError, InputError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    return 0


def open_remote(name: str, shell: str, command: Sequence[str], stack: ExitStack) -> FabricHost:
    """Run ``command``, which calls :func:`serve_requests`, on a host. ``shell``: the remote shell's
    command with ``{host}`` in it; ``stack``: ends both. Raises :class:`InputError` that names the
    host."""
    try:
        start = [part.replace("{host}", name) for part in shlex.split(shell)]
        process = JsonProcess([*start, *command])
    except ProbeError as error:
        raise InputError(f"{name}: {error}") from None
    stack.callback(process.close)
    return connect_host(name, process.send_request)


def connect_host(name: str, send: Callable[[dict[str, Any]], dict[str, Any]]) -> FabricHost:
    """Describe the host that ``send`` reaches. Raises :class:`InputError` that names it."""

    def send_request(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return send(request)
        except ProbeError as error:
            raise ProbeError(f"{name}: {error}") from None

    try:
        return FabricHost(
            name,
            send_request,
            tuple(FabricRail(**each) for each in send_request(DESCRIBE)["rails"]),
        )
    except (ProbeError, KeyError, TypeError) as error:
        raise InputError(str(error)) from None
