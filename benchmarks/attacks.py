"""What attacks on the ingest cost other jobs: how long their reports take to be answered.

    python benchmarks/attacks.py [--jobs 100] [--seconds 15] [--json FILE] [--check]

The ingest is the real one, in a process of its own; the API server is played (played_api.py). Jobs
report once a second, over TLS, alone and under each attack; p99 of the answers is compared. An
attacker is a process at the lowest priority, so that what others lose is what the ingest gives it,
and not that it takes the processor. With --check the exit status is 1 if p99 is above twice that
without an attack. A monopoly of the planners is measured by planning_service.py. Two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_reports import PERIOD, Reports
from ingest_cost import NAME, certificate, ingest_of, played_api
from operator_scale import MORE_THAN_SENT, job_of
from played_api import NAMESPACE, PlayedApi, kubeconfig, pod_of, token
from report_load import load
from scale_usage import Result, quantile

ATTACKER, VICTIM = "attacker", "j0"
"""A job of its own, whose token it has; and one of others."""
STAGES, LINES, SILENT, SLOW = 8, 16, 1500, 200
"""Stages of all jobs; connections of an attacker that sends as fast as it is answered, that says
nothing, and that sends slowly."""
BOMB_BYTES = 8 << 20
MOST_TIMES = 2.0
"""Goal: p99 of others, times that without an attack."""


class Attack:
    """An attacker's connections. ``token``: a valid one of its job."""

    def __init__(self, port: int, ca_file: str, token: str) -> None:
        self._port, self._token = port, token
        self._trust = ssl.create_default_context(cafile=ca_file)
        self._sequence = 0
        self._body = Reports(STAGES, 0).body(NAMESPACE, ATTACKER, 1, 0, "quiet").encode()

    async def connect(self, tls: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._trust if tls else None,
            server_hostname=NAME if tls else None, local_addr=("127.9.9.9", 0),
        )  # fmt: skip

    def head(self, path: str, length: int, token: str | None = None) -> bytes:
        return (
            f"POST /v1/jobs/{NAMESPACE}/{ATTACKER}/{path} HTTP/1.1\r\nHost: {NAME}\r\n"
            f"Authorization: Bearer {token or self._token}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    async def _ask_again_and_again(self, request: Callable[[], bytes]) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await self.connect()
                with contextlib.closing(writer):
                    while True:
                        writer.write(request())
                        head = (await reader.readuntil(b"\r\n\r\n")).lower()
                        start = head.index(b"content-length:") + 15
                        await reader.readexactly(int(head[start:].split(b"\r\n", 1)[0]))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    async def _many(self, one: Callable[[], Awaitable[None]], count: int) -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    async def flood(self) -> None:
        """Its own reports, as fast as they are answered."""
        reports = Reports(STAGES, 0)

        def request() -> bytes:
            body = reports.body(NAMESPACE, ATTACKER, self._next(), 0, "quiet").encode()
            return self.head("reports", len(body)) + body

        await self._many(lambda: self._ask_again_and_again(request), LINES)

    async def replayed(self) -> None:
        """One report again and again."""
        same = self.head("reports", len(self._body)) + self._body
        await self._many(lambda: self._ask_again_and_again(lambda: same), LINES)

    async def forged(self) -> None:
        """Tokens that nobody has made: each ends its connection."""
        start, middle, _ = self._token.split(".")

        def request() -> bytes:
            forged = f"{start}.{middle}.{self._next()}x"
            return self.head("reports", len(self._body), forged) + self._body

        await self._many(lambda: self._ask_again_and_again(request), LINES)

    async def others(self) -> None:
        """Tokens that the API server has made, and that are none for this job: for another one; for
        it, of a pod of another job; and of a rank of an earlier attempt. No two are the same, so
        that each of the latter has to be reviewed, and its pod to be read."""

        def request() -> bytes:
            number = self._next()
            name, pod = (
                (VICTIM, pod_of(VICTIM)),
                (ATTACKER, pod_of(VICTIM)),
                (ATTACKER, pod_of(ATTACKER, attempt=7)),
            )[number % 3]
            theirs = token(name, pod, signature=f"s{number}")
            return self.head("reports", len(self._body), theirs) + self._body

        await self._many(lambda: self._ask_again_and_again(request), LINES)

    async def bombs(self) -> None:
        """Plans that nobody wants, of the largest size."""
        bomb = self.head("plan", BOMB_BYTES) + b"x" * (1 << 16)
        await self._many(lambda: self._ask_again_and_again(lambda: bomb), LINES)

    async def silent(self) -> None:
        """Connections that say nothing."""

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await self.connect(tls=False)
                    with contextlib.closing(writer):
                        await reader.read()

        await self._many(one, SILENT)

    async def slow(self) -> None:
        """Reports that come byte by byte."""

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await self.connect()
                    with contextlib.closing(writer):
                        writer.write(self.head("reports", len(self._body)))
                        for at in range(len(self._body)):
                            writer.write(self._body[at : at + 1])
                            await writer.drain()
                            await asyncio.sleep(0.5)

        await self._many(one, SLOW)


ATTACKS = ("silent", "slow", "flood", "replayed", "forged", "others", "bombs")


@contextmanager
def attacked(what: str | None, port: int, ca_file: Path) -> Iterator[None]:
    if what is None:
        yield
        return
    seat = {"what": what, "port": port, "ca_file": str(ca_file), "token": token(ATTACKER)}
    process = subprocess.Popen([sys.executable, __file__, "--attack"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(seat).encode())
    process.stdin.close()
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the attacker ended: {process.returncode}; see above")
    finally:
        process.kill()
        process.wait()


def attack() -> None:
    os.nice(19)
    seat = json.load(sys.stdin)
    what = seat.pop("what")
    asyncio.run(getattr(Attack(**seat), what)())


def run(count: int, seconds: float) -> dict[str, Result]:
    names = [f"j{i}" for i in range(count)]
    specs = {name: job_of(STAGES, name)["spec"] for name in (*names, ATTACKER)}
    found: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        crt, key = certificate(folder)
        kubeconfig(
            folder / "kube", stack.enter_context(played_api(PlayedApi(specs), crt, key)), crt
        )
        ingest, port = ingest_of(folder, 0, 1)
        stack.callback(ingest.process.stop)
        ingest.start()
        jobs = [
            {"namespace": NAMESPACE, "name": n, "token": token(n), "stages": STAGES, "seed": 0}
            for n in names
        ]
        for turn, what in enumerate((None, *ATTACKS, None), 1):
            with (
                attacked(what, port, crt),
                load(
                    port=port, server_name=NAME, ca_file=str(crt), jobs=jobs, period=PERIOD,
                    seconds=seconds, first=turn * MORE_THAN_SENT,
                ) as figures,
            ):  # fmt: skip
                answers = figures()["answers"]
            name = what or ("alone" if "alone" not in found else "alone, again")
            found[name] = {f"p{100 * q:g}_ms": 1e3 * quantile(answers, q) for q in (0.5, 0.99)}
            found[name]["answers"] = len(answers)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def base_ms(found: dict[str, Result]) -> float:
    """p99 without an attack, before and after all."""
    return (found["alone"]["p99_ms"] + found["alone, again"]["p99_ms"]) / 2


def main() -> int:
    if "--attack" in sys.argv:
        attack()
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal does not hold")
    options = parser.parse_args()
    found = run(options.jobs, options.seconds)
    base = base_ms(found)
    print("| others' reports, answered within, ms | p50 | p99 | times |\n|---|---:|---:|---:|")
    for name, row in found.items():
        times = row["p99_ms"] / base
        print(f"| {name} | {row['p50_ms']:.1f} | {row['p99_ms']:.1f} | {times:.1f} |")
    missed = [name for name in ATTACKS if found[name]["p99_ms"] > MOST_TIMES * base]
    verdict = "DOES NOT HOLD" if missed else "holds"
    named = f" (not {', '.join(missed)})" if missed else ""
    print(f"p99 of others ≤ {MOST_TIMES:g} × {base:.1f} ms under each attack{named}: {verdict}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
