"""What viewers of a large job cost those who report: times with and without them.

    python benchmarks/viewers.py [--viewers 10] [--rounds 4] [--before FOLDER] [--check]

The ingest is the real one, in a process of its own; the API server is played (played_api.py). Jobs
report once a second over TLS, each with a long poll; one of them, of 64 stages × 256 microbatches,
sends the ops of an iteration a second while somebody watches it. In each turn links of others turn
slow: a directive is timed from the alarm. Viewers ask for the page, then for a document a second.
Times with and without viewers take turns, so that what else the machine does is in both.
``--before``: a checkout of another version with its own .venv, which is measured first.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gzip
import json
import os
import ssl
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]

from agent_reports import ITERATION, PERIOD  # noqa: E402
from ingest_cost import NAME, certificate, ingest_of, played_api, wait_until_all_serve  # noqa: E402
from operator_scale import MORE_THAN_SENT, gain, job_of  # noqa: E402
from played_api import NAMESPACE, PlayedApi, kubeconfig, token  # noqa: E402
from report_load import load  # noqa: E402
from scale_usage import Result, children, cpu_seconds, quantile, resident_bytes  # noqa: E402
from watched_jobs import NOW, watched  # noqa: E402

from pipemorph.watch.access import HEADER, audience, path  # noqa: E402
from pipemorph.wire import OpsReport, OpsTrace  # noqa: E402

STAGES, MICROBATCHES = 64, 256
WATCHED, OTHERS, OTHER_STAGES = "large", 96, 8
PICTURE = b'"measured":{"'
"""In a document with the ops of an iteration."""
SETTLE, TURN = 30.0, 12.0
"""Seconds before anything is measured, in which each viewer is to have a page, and of each turn."""
APART = 2.0
"""Seconds at the start of a turn that are not counted."""
MOST_MORE = 1.1
"""Goal: p99 with viewers over that without, of reports and of directives."""
MOST_CORES = 0.05
"""Goal: of a core per viewer, at the ingest and all that it starts for viewers."""


def viewer_token(number: int) -> str:
    """Of an account that may watch the job: each viewer has one of its own."""
    claims = {
        "aud": [audience(NAMESPACE, WATCHED)], "exp": time.time() + 86400, "pod": f"v{number}",
    }  # fmt: skip
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"head.{part}.signature"


class Watchers:
    """Viewers of the job, and its agent as far as it sends ops; in a thread of their own, which
    takes nothing apart that it is sent. ``began``: when its reports did. They look while
    ``looking`` is set. ``answers``: to viewers, by status or error; ``waited``: of those who had
    one, from the first question on."""

    def __init__(self, port: int, authority: Path, viewers: int, began: float) -> None:
        self._url, self._viewers = f"https://{NAME}:{port}", viewers
        self._trust = ssl.create_default_context(cafile=str(authority))
        self.answers: Counter[str] = Counter()
        self.waited: dict[int, float] = {}
        self.picture = 0.0
        """Seconds from the first viewer's first question until it had a picture; 0: not yet."""
        self.bytes, self.ops, self.refused = 0, 0, ""
        self.looking = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        _, traces = watched(STAGES, MICROBATCHES)
        self._stages = [
            OpsTrace.of((each.rank, each.stage, 0), 0, 0, NOW, each.ops) for each in traces
        ]
        self._began = began
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watchers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(30)

    def wait_until_answered(self, says: Callable[[], str]) -> None:
        """Until each has had a page. Raises RuntimeError. ``says``: how the ingest is."""
        while (lacking := self._viewers - len(self.waited)) > 0:
            self.check()
            if time.monotonic() > self._began + SETTLE:
                raise RuntimeError(
                    f"{lacking} of {self._viewers} viewers have had no page after {SETTLE:g} s,"
                    f" when turns begin; answers: {dict(self.answers)}; the ingest says: {says()}."
                    " The machine may be too busy to measure."
                )
            time.sleep(0.1)

    def wait_for_picture(self) -> float:
        """How long the first viewer has waited for a picture; 0 if none came before turns begin."""
        while not self.picture and time.monotonic() < self._began + SETTLE - 1:
            self.check()
            time.sleep(0.1)
        return self.picture

    def check(self) -> None:
        """Raises RuntimeError if viewers look no more."""
        if self._failed is not None:
            raise RuntimeError(f"the viewers failed: {self._failed!r}") from self._failed

    def _run(self) -> None:
        os.nice(5)  # A thread of its own: those who measure go first.
        done = self._loop.create_task(self._all())
        self._loop.run_until_complete(asyncio.wait([done]))
        self._failed = done.exception()
        self._loop.close()

    async def _all(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._trust, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            tasks = [asyncio.create_task(self._watch(session, i)) for i in range(self._viewers)]
            tasks.append(asyncio.create_task(self._send_ops(session)))
            ending = asyncio.create_task(self._ending.wait())
            await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for each in (ending, *tasks):
                each.cancel()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, Exception):
                    raise found

    async def _watch(self, session: aiohttp.ClientSession, number: int) -> None:
        headers, what, seen = {HEADER: viewer_token(number)}, "", number != 0
        await asyncio.sleep(number / max(1, self._viewers))
        first = time.monotonic()
        while True:
            began = time.monotonic()
            if self.looking.is_set():
                try:
                    where = self._url + path(NAMESPACE, WATCHED) + what
                    async with session.get(where, headers=headers) as answer:
                        body = await answer.read()
                        self.bytes += len(body)
                        self.answers[str(answer.status)] += 1
                        if answer.status == 200:
                            what = "view"
                            self.waited.setdefault(number, time.monotonic() - first)
                            if not seen and has_picture(answer, body):
                                self.picture, seen = time.monotonic() - first, True
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.answers[type(error).__name__] += 1
            await asyncio.sleep(max(0.0, began + 1 - time.monotonic()))

    async def _send_ops(self, session: aiohttp.ClientSession) -> None:
        headers = {
            "Authorization": f"Bearer {token(WATCHED)}", "Content-Encoding": "deflate",
        }  # fmt: skip
        where = f"{self._url}/v1/jobs/{NAMESPACE}/{WATCHED}/ops"
        while True:
            if not self.looking.is_set():
                await asyncio.sleep(0.2)
                continue
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
            try:
                async with session.post(where, data=packed, headers=headers) as answer:
                    self.ops += answer.status == 200
                    if answer.status != 200:
                        self.refused = f"{answer.status} {(await answer.read())[:200]!r}"
            except (aiohttp.ClientError, TimeoutError) as error:
                self.refused = repr(error)
            await asyncio.sleep(1.0)


def has_picture(answer: aiohttp.ClientResponse, body: bytes) -> bool:
    """Whether a page or document has the ops of an iteration."""
    packed = answer.headers.get("Content-Encoding") == "gzip"
    return PICTURE in (gzip.decompress(body) if packed else body)


def with_viewers(turn: int) -> bool:
    """Turns without and with them, in an order in which neither is later than the other."""
    return turn % 4 in {1, 2}


def played(rounds: int) -> dict[str, dict[str, Any]]:
    """What each job's agent plays: a link of each small one turns slow in some turn."""
    jobs: dict[str, dict[str, Any]] = {WATCHED: {"stages": STAGES, "seed": 0}}
    drawn, each_turn = 0, OTHERS // (2 * rounds)
    for number in range(OTHERS):
        drawn += 1
        while not (times := gain(OTHER_STAGES, drawn)):
            drawn += 1
        turn, place = divmod(number, each_turn)
        counted = TURN - APART - 1.0  # Within the turn comes the directive, too.
        at = SETTLE + turn * TURN + APART + counted * place / each_turn
        jobs[f"j{number}"] = {
            "stages": OTHER_STAGES, "seed": drawn, "slow_at": at,
            "slow_iteration": times * ITERATION,
        }  # fmt: skip
    return jobs


def pages_of(pid: int) -> int | None:
    """The child that makes pages."""
    for child in children(pid):
        with contextlib.suppress(FileNotFoundError):
            if b"ingest.viewing" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


@dataclass
class Span:
    """A turn, in seconds since all report; processor seconds of the ingest, and of its process that
    makes pages. ``waited``: seconds in which the ingest had to run, and had no processor."""

    with_them: bool
    start: float
    end: float
    own: float
    pages: float
    waited: float


def waited_seconds(pid: int) -> float:
    """How long a process's main thread has waited for a processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def measured(sources: Path, viewers: int, rounds: int, jobs: dict[str, dict[str, Any]]) -> Result:
    """One version of the ingest, with turns without and with viewers."""
    specs = {name: job_of(each["stages"], name)["spec"] for name, each in jobs.items()}
    specs[WATCHED]["schedule"]["microbatches"] = MICROBATCHES
    with tempfile.TemporaryDirectory(prefix="bench-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        crt, key = certificate(folder)
        port = stack.enter_context(played_api(PlayedApi(specs), crt, key))
        kubeconfig(folder / "kube", port, crt)
        ingest, port = ingest_of(folder, 0, 1, sources)
        stack.callback(ingest.process.stop)
        ingest.start()
        wait_until_all_serve([ingest])
        pid = ingest.process.pid
        agents = [
            {"namespace": NAMESPACE, "name": name, "token": token(name), **each}
            for name, each in jobs.items()
        ]
        spans: list[Span] = []
        memory = pages_memory = 0
        with load(
            port=port, server_name=NAME, ca_file=str(crt), jobs=agents, period=PERIOD,
            seconds=SETTLE + 2 * rounds * TURN, first=MORE_THAN_SENT,
        ) as figures:  # fmt: skip
            began = time.monotonic()
            with Watchers(port, crt, viewers, began) as watch:
                watch.looking.set()
                watch.wait_until_answered(ingest.says)
                cold, picture = watch.waited[0], watch.wait_for_picture()
                waited = max(watch.waited.values())
                watch.answers.clear()
                watch.bytes = watch.ops = 0
                for turn in range(2 * rounds):
                    start, looks = SETTLE + turn * TURN, with_viewers(turn)
                    if turn == 0:
                        watch.looking.clear()  # For the rest of the settling.
                    time.sleep(max(0.0, began + start - time.monotonic()))
                    (watch.looking.set if looks else watch.looking.clear)()
                    time.sleep(APART)
                    pages = pages_of(pid)
                    lacked = waited_seconds(pid)
                    own, theirs = cpu_seconds(pid), cpu_seconds(pages) if pages else 0.0
                    end = start + TURN
                    time.sleep(max(0.0, began + end - 0.3 - time.monotonic()))
                    own = cpu_seconds(pid) - own
                    theirs = cpu_seconds(pages) - theirs if pages else 0.0
                    lacked = waited_seconds(pid) - lacked
                    spans.append(Span(looks, start + APART, end, own, theirs, lacked))
                    memory = max(memory, resident_bytes(pid))
                    if pages is not None:
                        pages_memory = max(pages_memory, resident_bytes(pages))
                    watch.check()
            found = figures()
    answers = watch.answers
    said = ", ".join(f"{count} × {status}" for status, count in sorted(answers.items()))
    print(
        f"{sources}: the last viewer had a page after {waited:.1f} s; answers to viewers: {said};"
        f" {watch.ops} ops taken {watch.refused}",
        file=sys.stderr,
    )
    if not answers["200"]:
        raise RuntimeError(f"no viewer was answered in the turns with viewers; answers: {said}")
    return {
        "reports": len(found["answers"]),
        "documents": answers["200"],
        "refused": answers.total() - answers["200"],
        "cold_s": cold,
        "cold_picture_s": picture,
        "late_ms": 1e3 * found["late"],
        "stalled_ms": 1e3 * found["stalled"],
        "megabytes": watch.bytes / 1e6,
        "memory_mib": memory / 2**20,
        "pages_memory_mib": pages_memory / 2**20,
        **processors(spans, viewers),
        **answered(spans, found),
    }


def processors(spans: list[Span], viewers: int) -> Result:
    """Cores that the ingest takes without and with viewers, that its process of pages takes, and
    what both take more for each viewer."""
    wall = TURN - APART - 0.3
    own = {kind: fmean(each.own for each in spans if each.with_them is kind) / wall
           for kind in (False, True)}  # fmt: skip
    pages = fmean(each.pages for each in spans if each.with_them) / wall
    lacked = {kind: fmean(each.waited for each in spans if each.with_them is kind) / wall
              for kind in (False, True)}  # fmt: skip
    return {
        "lacked_without": lacked[False],
        "lacked_with": lacked[True],
        "cores_without": own[False],
        "cores_with": own[True],
        "cores_pages": pages,
        "cores_per_viewer": (own[True] - own[False] + pages) / viewers,
    }


def answered(spans: list[Span], found: dict[str, Any]) -> Result:
    """Times of reports, and from an alarm to its directive, without and with viewers."""
    times = {
        "report": list(zip(found["answered_at"], found["answers"], strict=True)),
        "directive": [(at, took) for _, at, took, _ in found["directives"]],
    }
    result: Result = {}
    for what, all_of_them in times.items():
        for name, kind in (("without", False), ("with", True)):
            counted = [
                took for at, took in all_of_them
                if any(each.with_them is kind and each.start <= at < each.end for each in spans)
            ]  # fmt: skip
            if not counted:
                raise RuntimeError(f"no {what} was measured {name} viewers; use more --rounds")
            result[f"{what}s_{name}"] = len(counted)
            for quantum, q in QUANTILES:
                result[f"{what}_{quantum}_{name}_ms"] = 1e3 * quantile(counted, q)
    return result


QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def more(each: Result, what: str, quantum: str = "p99") -> float:
    """With viewers over without."""
    return each[f"{what}_{quantum}_with_ms"] / each[f"{what}_{quantum}_without_ms"]


def table(found: dict[str, Result], viewers: int) -> str:
    columns = list(found)
    lines = [
        f"| {viewers} viewers of {STAGES} × {MICROBATCHES} | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for what, text in (("report", "answer to a report"), ("directive", "alarm to directive")):
        for quantum, _ in QUANTILES:
            cells = [
                f"{each[f'{what}_{quantum}_without_ms']:.1f} →"
                f" {each[f'{what}_{quantum}_with_ms']:.1f} ms (× {more(each, what, quantum):.2f})"
                for each in found.values()
            ]
            lines.append(f"| {text}, {quantum}: without → with | {' | '.join(cells)} |")
    rows: list[tuple[str, Any]] = [
        ("reports, directives: without; with", lambda e:
         f"{e['reports_without']:.0f}, {e['directives_without']:.0f};"
         f" {e['reports_with']:.0f}, {e['directives_with']:.0f}"),
        ("processors: ingest without → with; its process of pages; both per viewer", lambda e:
         f"{e['cores_without']:.3f} → {e['cores_with']:.3f}; {e['cores_pages']:.3f};"
         f" {e['cores_per_viewer']:.4f}"),
        ("memory: ingest; its process of pages", lambda e:
         f"{e['memory_mib']:.0f} MiB; {e['pages_memory_mib']:.0f} MiB"),
        ("the first viewer, for whom the process of pages is started: until it has a page; until"
         " that has a picture", lambda e:
         f"{e['cold_s']:.1f}; {e['cold_picture_s']:.1f} s" if e["cold_picture_s"]
         else f"{e['cold_s']:.1f} s; none came"),
        ("part of the time in which the ingest waited for a processor", lambda e:
         f"{e['lacked_without']:.2f} → {e['lacked_with']:.2f}"),
        ("the longest that the agents' own process did not run", lambda e:
         f"{e['stalled_ms']:.0f} ms"),
        ("answers with a document or page; others; sent", lambda e:
         f"{e['documents']:.0f}; {e['refused']:.0f}; {e['megabytes']:.0f} MB"),
    ]  # fmt: skip
    lines += [f"| {what} | {' | '.join(map(of, found.values()))} |" for what, of in rows]
    return "\n".join(lines)


def goals(now: Result) -> bool:
    """Whether they hold; says so."""
    found = [
        (f"p99 of {what}s with viewers over without", more(now, what), MOST_MORE)
        for what in ("report", "directive")
    ]
    found.append(("cores per viewer", now["cores_per_viewer"], MOST_CORES))
    for what, value, most in found:
        print(f"{what} ≤ {most:g}: {value:.3g} {'holds' if value <= most else 'DOES NOT HOLD'}")
    return all(value <= most for _, value, most in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--before", type=Path, help="checkout of another version, with its .venv")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal does not hold")
    options = parser.parse_args()
    if not 1 <= options.rounds <= OTHERS // 2 or options.viewers < 1:
        parser.error(f"expected --viewers above 0 and --rounds from 1 to {OTHERS // 2}")
    jobs = played(options.rounds)
    print(f"load of the machine before: {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
    found = {}
    if options.before is not None:
        found["before"] = measured(options.before.resolve(), options.viewers, options.rounds, jobs)
    found["now"] = measured(ROOT, options.viewers, options.rounds, jobs)
    print(table(found, options.viewers))
    print(f"load of the machine at the end: {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
    hold = goals(found["now"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if options.check and not hold else 0


if __name__ == "__main__":
    sys.exit(main())
