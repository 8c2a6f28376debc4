"""What viewers of a large job cost those who report: answers to reports, with and without them.

    python benchmarks/viewers.py [--viewers 10] [--rounds 3] [--before FOLDER] [--check]

The ingest is the real one, in a process of its own; the API server is played (played_api.py). Jobs
report once a second over TLS, each with a long poll; one of them, of 64 stages × 256 microbatches,
sends the ops of an iteration a second while somebody watches it. Viewers ask for its page, and then
for a document a second each. Times with and without viewers take turns, so that what else the
machine does is in both. ``--before``: a folder with the sources of another version, which takes
turns with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import ssl
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]

from agent_reports import PERIOD  # noqa: E402
from ingest_cost import NAME, certificate, ingest_of, played_api, wait_until_all_serve  # noqa: E402
from operator_scale import MORE_THAN_SENT, job_of  # noqa: E402
from played_api import NAMESPACE, PlayedApi, kubeconfig, token  # noqa: E402
from report_load import load  # noqa: E402
from scale_usage import Result, children, cpu_seconds, quantile, resident_bytes  # noqa: E402
from watched_jobs import NOW, watched  # noqa: E402

from pipemorph.watch.access import HEADER, audience, path  # noqa: E402
from pipemorph.wire import OpsReport, OpsTrace  # noqa: E402

STAGES, MICROBATCHES = 64, 256
WATCHED, OTHERS, OTHER_STAGES = "large", 30, 8
SETTLE, TURN = 8.0, 12.0
"""Seconds before anything is measured, and of each turn."""
APART = 2.0
"""Seconds at the start of a turn that are not counted."""
MOST_MORE = 1.1
"""Goal: the p99 of answers with viewers over that without."""


def viewer_token(number: int) -> str:
    """Of an account that may watch the job: each viewer has one of its own."""
    claims = {
        "aud": [audience(NAMESPACE, WATCHED)], "exp": time.time() + 86400, "pod": f"v{number}",
    }  # fmt: skip
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"head.{part}.signature"


class Watchers:
    """Viewers of the job, and its agent as far as it sends ops; in a thread of their own, which
    takes nothing apart that it is sent. ``began``: when its reports did. ``statuses``: of answers
    to viewers, counted."""

    def __init__(self, port: int, authority: Path, viewers: int, began: float) -> None:
        self._url, self._viewers = f"https://{NAME}:{port}", viewers
        self._trust = ssl.create_default_context(cafile=str(authority))
        self.statuses: dict[int, int] = {}
        self.bytes, self.ops, self.refused = 0, 0, ""
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        _, traces = watched(STAGES, MICROBATCHES)
        self._stages = [
            OpsTrace.of((each.rank, each.stage, 0), 0, 0, NOW, each.ops) for each in traces
        ]
        self._began = began
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watchers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(30)

    def _run(self) -> None:
        os.nice(5)  # A thread of its own: those who measure go first.
        self._loop.run_until_complete(self._all())
        self._loop.close()

    async def _all(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._trust, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            tasks = [asyncio.create_task(self._watch(session, i)) for i in range(self._viewers)]
            tasks.append(asyncio.create_task(self._send_ops(session)))
            await self._ending.wait()
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, session: aiohttp.ClientSession, number: int) -> None:
        headers, what = {HEADER: viewer_token(number)}, ""
        await asyncio.sleep(number / max(1, self._viewers))
        while True:
            began = time.monotonic()
            with contextlib.suppress(aiohttp.ClientError):
                where = self._url + path(NAMESPACE, WATCHED) + what
                async with session.get(where, headers=headers) as answer:
                    self.bytes += len(await answer.read())
                    self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
                    if answer.status == 200:
                        what = "view"
            await asyncio.sleep(max(0.0, began + 1 - time.monotonic()))

    async def _send_ops(self, session: aiohttp.ClientSession) -> None:
        headers = {
            "Authorization": f"Bearer {token(WATCHED)}", "Content-Encoding": "deflate",
        }  # fmt: skip
        where = f"{self._url}/v1/jobs/{NAMESPACE}/{WATCHED}/ops"
        while True:
            iteration = MORE_THAN_SENT + int((time.monotonic() - self._began) / PERIOD)
            report = OpsReport(
                job=WATCHED, namespace=NAMESPACE, attempt=0, column=0, iteration=iteration,
                stages=[
                    each.model_copy(update={"iteration": iteration})
                    for each in self._stages
                    if each is not None
                ],
            )  # fmt: skip
            packed = zlib.compress(report.body(), 1)
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(where, data=packed, headers=headers) as answer:
                    self.ops += answer.status == 200
                    if answer.status != 200:
                        self.refused = f"{answer.status} {(await answer.read())[:200]!r}"
            await asyncio.sleep(1.0)


def measured(sources: Path, viewers: int, rounds: int) -> Result:
    """One version of the ingest, with turns without and with viewers."""
    specs = {f"j{i}": job_of(OTHER_STAGES, f"j{i}")["spec"] for i in range(OTHERS)}
    specs[WATCHED] = job_of(STAGES, WATCHED)["spec"]
    specs[WATCHED]["schedule"]["microbatches"] = MICROBATCHES
    whole = SETTLE + 2 * rounds * TURN
    with tempfile.TemporaryDirectory(prefix="bench-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        crt, key = certificate(folder)
        port = stack.enter_context(played_api(PlayedApi(specs), crt, key))
        kubeconfig(folder / "kube", port, crt)
        ingest, port = ingest_of(folder, 0, 1, sources)
        stack.callback(ingest.process.stop)
        ingest.start()
        wait_until_all_serve([ingest])
        jobs = [
            {"namespace": NAMESPACE, "name": name, "token": token(name), "seed": 0,
             "stages": STAGES if name == WATCHED else OTHER_STAGES}
            for name in specs
        ]  # fmt: skip
        pid = ingest.process.pid
        statuses: dict[int, int] = {}
        spans: list[tuple[bool, float, float, float]] = []
        most = taken = ops = 0.0
        refused = ""
        with load(
            port=port, server_name=NAME, ca_file=str(crt), jobs=jobs, period=PERIOD,
            seconds=whole, first=MORE_THAN_SENT,
        ) as figures:  # fmt: skip
            began = time.monotonic()
            for turn in range(2 * rounds):
                start = SETTLE + turn * TURN
                watch = Watchers(port, crt, viewers, began) if turn % 2 else None
                time.sleep(max(0.0, began + start - time.monotonic()))
                with watch or contextlib.nullcontext():
                    time.sleep(APART)
                    cpu = cpu_seconds(pid)
                    time.sleep(max(0.0, began + start + TURN - 0.3 - time.monotonic()))
                    spans.append((bool(turn % 2), start + APART, start + TURN, 0.0))
                    spans[-1] = (*spans[-1][:3], cpu_seconds(pid) - cpu)
                    if watch is not None:
                        most = max([most, *(resident_bytes(each) for each in [pid])])
                        beside = [resident_bytes(each) for each in children(pid)]
                if watch is not None:
                    taken, ops = taken + watch.bytes, ops + watch.ops
                    refused = watch.refused or refused
                    for status, count in watch.statuses.items():
                        statuses[status] = statuses.get(status, 0) + count
            found = figures()
    times: dict[bool, list[float]] = {False: [], True: []}
    for at, took in zip(found["answered_at"], found["answers"], strict=True):
        for with_them, start, end, _ in spans:
            if start <= at < end:
                times[with_them].append(took)
    cpus = {
        kind: sum(each[3] for each in spans if each[0] is kind) / rounds / (TURN - APART)
        for kind in times
    }
    said = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
    print(f"{sources}: answers to viewers: {said}; {ops:.0f} ops taken {refused}", file=sys.stderr)
    return {
        "reports": len(found["answers"]),
        "documents": statuses.get(200, 0),
        "refused": sum(count for status, count in statuses.items() if status != 200),
        "late_ms": 1e3 * found["late"],
        "megabytes": taken / 1e6,
        "cores_without": cpus[False],
        "cores_with": cpus[True],
        "memory_mib": most / 2**20,
        "largest_child_mib": max(beside, default=0) / 2**20,
        **{
            f"{name}_{kind}_ms": 1e3 * quantile(times[with_them], q)
            for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
            for kind, with_them in (("without", False), ("with", True))
        },
    }


def table(found: dict[str, Result], viewers: int) -> str:
    columns = list(found)
    lines = [
        f"| {viewers} viewers of {STAGES} × {MICROBATCHES} | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name in ("p50", "p90", "p99"):
        cells = [
            f"{each[f'{name}_without_ms']:.1f} → {each[f'{name}_with_ms']:.1f} ms"
            f" (× {each[f'{name}_with_ms'] / each[f'{name}_without_ms']:.2f})"
            for each in found.values()
        ]
        lines.append(
            f"| a report is answered within, {name}: without → with | {' | '.join(cells)} |"
        )
    rows: list[tuple[str, Any]] = [
        ("processors busy, without its children", lambda e:
         f"{e['cores_without']:.3f} → {e['cores_with']:.3f}"),
        ("memory; of its largest child", lambda e:
         f"{e['memory_mib']:.0f} MiB; {e['largest_child_mib']:.0f} MiB"),
        ("answers with a document or page; others; sent", lambda e:
         f"{e['documents']:.0f}; {e['refused']:.0f}; {e['megabytes']:.0f} MB"),
    ]  # fmt: skip
    lines += [f"| {what} | {' | '.join(map(of, found.values()))} |" for what, of in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="sources of another version to compare with")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if the goal does not hold")
    options = parser.parse_args()
    versions = {"now": ROOT} | ({"before": options.before} if options.before else {})
    found = {}
    for name, sources in reversed(versions.items()):
        found[name] = measured(sources, options.viewers, options.rounds)
    print(table(found, options.viewers))
    print(f"load of the machine at the end: {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
    more = found["now"]["p99_with_ms"] / found["now"]["p99_without_ms"]
    holds = more <= MOST_MORE
    print(f"p99 with viewers ≤ {MOST_MORE:g} × p99 without: {more:.2f}"
          f" {'holds' if holds else 'DOES NOT HOLD'}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if options.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
