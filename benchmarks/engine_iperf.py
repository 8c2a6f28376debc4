"""iperf3, which the TCP path is measured against: found on PATH, or unpacked from Debian's package
below ~/.cache/pipemorph without touching the system."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SECONDS = 1
PACKAGES = ("iperf3", "libiperf0", "libsctp1")
START_DEADLINE = 60.0


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
        return subprocess.run(
            [self.path, *arguments],
            check=False,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=60,
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
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise IperfError("found no iperf3 on PATH and no apt-get to fetch it with: install iperf3")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        work = Path(folder)
        for last in (False, True):
            done = subprocess.run(
                ["apt-get", "-q", "download", *PACKAGES],
                check=False,
                cwd=work,
                capture_output=True,
                text=True,
                timeout=300,
            )
            if done.returncode == 0:
                break
            if not last and os.geteuid() == 0:  # without package lists, or with old ones
                subprocess.run(
                    ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "update"],
                    check=False,  # the next download says what is missing
                    capture_output=True,
                    timeout=300,
                )
        else:
            raise IperfError(
                f"found no iperf3 on PATH, and apt-get download {' '.join(PACKAGES)} failed "
                f"({done.stderr.strip()[-300:]}): run apt-get update, or install iperf3"
            )
        for archive in sorted(work.glob("*.deb")):
            subprocess.run(["dpkg", "-x", archive, work / "root"], check=True, timeout=60)
        # In one step, so that two runs at a time cannot see half of it.
        try:
            (work / "root").rename(root)
        except OSError:
            if not (root / "usr/bin/iperf3").exists():
                raise
