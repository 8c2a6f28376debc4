"""The hosts of a check: this one, and those that a remote shell reaches.

The leader sends all of them the same requests: those of :mod:`pipemorph.fabric.verbs_probe`, and
``describe``, whose result has ``rails``.
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

from pipemorph.discovery import rdma
from pipemorph.errors import InputError
from pipemorph.fabric.json_process import JsonProcess, ProbeError

LOCALHOST = "localhost"
DESCRIBE = {"op": "describe"}
PROGRAM = Path(__file__).with_name("verbs_probe.py")
PYTHONS = (sys.executable, "/usr/bin/python3")
"""Pythons that may have pyverbs: this one, and the distribution's."""


@dataclass(frozen=True)
class Rail:
    """One RDMA port of a host. ``active``: whether it can be used; ``gid``, ``gid_index``: its
    address, None without one; ``mtu``: active MTU, bytes, None if unknown; ``rate``: in sysfs
    notation."""

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
class Host:
    """A host as the leader sees it. ``request``: carries out a request, or raises a
    :class:`ProbeError` that names the host."""

    name: str
    request: Callable[[dict[str, Any]], dict[str, Any]]
    rails: tuple[Rail, ...]


class LocalHost:
    """This host. Raises :class:`InputError` without pyverbs, or without a named device."""

    def __init__(
        self, devices: Sequence[str] = (), gid_index: int | None = None, sysfs: Path = rdma.SYSFS
    ) -> None:
        self._sysfs, self._devices, self._gid_index = sysfs, devices, gid_index
        self._probe = start_probe()
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self.rails()
            on_error.pop_all()

    def rails(self) -> list[Rail]:
        """The ports that take part."""
        try:
            mtus = self._probe.request({"op": "ports"})["ports"]
        except ProbeError:
            mtus = {}  # pyverbs raises where the kernel has no RDMA.
        ports = rdma.ports(rdma.devices(self._sysfs))
        found = [
            self._rail(port, mtus.get(str(port)))
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

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request. Raises :class:`ProbeError`."""
        if request == DESCRIBE:
            return {"rails": [asdict(rail) for rail in self.rails()]}
        return self._probe.request(request)

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


def serve(make_host: Callable[[], LocalHost]) -> int:
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
                answer = host.request(json.loads(line))
            except (ProbeError, InputError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    return 0


def open_remote(name: str, shell: str, command: Sequence[str], stack: ExitStack) -> Host:
    """Run ``command``, which calls :func:`serve`, on a host. ``shell``: the remote shell's command
    with ``{host}`` in it; ``stack``: ends both. Raises :class:`InputError` that names the host."""
    try:
        start = [part.replace("{host}", name) for part in shlex.split(shell)]
        process = JsonProcess([*start, *command])
    except ProbeError as error:
        raise InputError(f"{name}: {error}") from None
    stack.callback(process.close)
    return describe(name, process.request)


def describe(name: str, send: Callable[[dict[str, Any]], dict[str, Any]]) -> Host:
    """The host that ``send`` reaches. Raises :class:`InputError` that names it."""

    def request(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return send(request)
        except ProbeError as error:
            raise ProbeError(f"{name}: {error}") from None

    try:
        return Host(name, request, tuple(Rail(**each) for each in request(DESCRIBE)["rails"]))
    except (ProbeError, KeyError, TypeError) as error:
        raise InputError(str(error)) from None
