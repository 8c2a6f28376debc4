"""iperf3, which the TCP path is measured against: found on PATH, or unpacked from Debian's package
below ~/.cache/pipemorph without touching the system."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from testbed import TestbedError
from testbed.packages import PackageSource

SECONDS = 1
PACKAGES = ("iperf3", "libiperf0", "libsctp1")
START_DEADLINE = 60.0
UNPACK_SECONDS = 600.0


class IperfError(RuntimeError):
    """iperf3 cannot be had, or failed."""


@contextmanager
def held_port() -> Iterator[int]:
    """A port of loopback that nobody else is given meanwhile. Who listens there may have it: he
    asks to share (SO_REUSEADDR), so does its holder, and only one of them listens."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@dataclass(frozen=True)
class Program:
    path: str
    environment: dict[str, str]

    def version(self) -> str:
        return self._run("--version").stdout.split("\n", 1)[0]

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self.path, *arguments]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, env=self.environment, timeout=60
        )

    def seconds(self, volume: int, streams: int) -> tuple[float, float]:
        """What ``volume`` bytes would take over loopback at the rate of a run of a second, as
        seconds of the clock and of both processors. :raises IperfError: it failed."""
        with held_port() as port:
            received, usage = self._measured(str(port), streams)
        share = volume / received["bytes"]
        busy = (usage["host_total"] + usage["remote_total"]) / 100
        return received["seconds"] * share, busy * received["seconds"] * share

    def _measured(self, port: str, streams: int) -> tuple[dict[str, float], dict[str, float]]:
        """What the receiver got, and how busy both processors were, percent."""
        address = ["-B", "127.0.0.1", "-p", port]
        server = subprocess.Popen(
            [self.path, "-s", "-1", *address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )
        try:
            deadline = time.monotonic() + START_DEADLINE
            while True:  # until it listens
                done = self._run(
                    *("-c", "127.0.0.1", "-p", port, "-P", str(streams), "-J", "-t", str(SECONDS))
                )
                said = json.loads(done.stdout)
                if "error" not in said:  # the exit status is 0 either way
                    break
                if time.monotonic() > deadline or server.poll() is not None:
                    raise IperfError(f"iperf3 failed: {said['error']}")
                time.sleep(0.05)
        finally:
            server.terminate()
            server.communicate()
        return said["end"]["sum_received"], said["end"]["cpu_utilization_percent"]


def find() -> Program:
    """:raises IperfError: neither on PATH nor in Debian's archive; says what to do."""
    if found := shutil.which("iperf3"):
        return Program(found, dict(os.environ))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pipemorph"
    root = cache / "iperf3"
    if not (root / "usr/bin/iperf3").exists():
        _unpack(root)
    libraries = ":".join(str(p) for p in sorted((root / "usr/lib").glob("*-linux-gnu")))
    return Program(str(root / "usr/bin/iperf3"), {**os.environ, "LD_LIBRARY_PATH": libraries})


def _unpack(root: Path) -> None:
    end = time.monotonic() + UNPACK_SECONDS
    source = PackageSource(root.parent / "apt-iperf3")
    try:
        source.update(print, end)
        with tempfile.TemporaryDirectory(dir=root.parent) as work:
            for package in PACKAGES:
                source.unpack(package, Path(work) / "root", print, end)
            # In one step, so that two runs at a time cannot see half of it.
            with suppress(OSError):
                (Path(work) / "root").rename(root)
    except TestbedError as error:
        raise IperfError(f"found no iperf3 on PATH: {error}; install iperf3") from error
