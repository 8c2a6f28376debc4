"""What one report costs the ingest, and how soon a restarted one has answered everybody.

    python benchmarks/ingest_cost.py [--jobs 1000] [--stages 8] [--replicas 1] [--check]

The ingest is the real one, in a process of its own; the API server is played (played_api.py). Jobs
are those of operator_scale.py: each reports while its links are well, as seldom as it is asked to,
over TLS, and holds a long poll. Then the ingest is killed and started; of several replicas, among
which the jobs are dealt, one is killed, and the others serve its jobs. Figures are processor time
of the ingest without its planners, with all that it does beside reports: they hold on a busy
machine, seconds do not. Under two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]

from agent_reports import PERIOD  # noqa: E402
from certificates import self_signed  # noqa: E402
from operator_scale import (  # noqa: E402
    MORE_THAN_SENT,
    job_of,
    mixed,
)
from operator_support import Program, free_port  # noqa: E402
from played_api import NAMESPACE, PlayedApi, kubeconfig, token  # noqa: E402
from report_load import load  # noqa: E402
from scale_table import LET_BE  # noqa: E402
from scale_usage import Result, cpu_seconds, quantile, resident_bytes  # noqa: E402

SETTLE, QUIET, RESTART = 20.0, 20.0, 30.0
"""Seconds before anything is measured, of which it is measured, and after the restart."""
SEATED = 30.0
"""Seconds until all replicas must serve."""
NAME = "localhost"
MOST_US, MOST_MIB, MOST_BACK = 1000.0, 512.0, 10.0
"""Goals: processor time of a report: so that one processor takes a thousand a second; memory; and
seconds until all are answered again."""


def certificate(folder: Path) -> tuple[Path, Path]:
    """``tls.crt``, a certificate that is its own authority, and ``tls.key``."""
    return self_signed(folder, NAME, "127.0.0.1")


@contextmanager
def played_api(api: PlayedApi, crt: Path, key: Path) -> Iterator[int]:
    """The port of an API server in a thread of its own."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(crt, key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner, port = asyncio.run_coroutine_threadsafe(api.serve(tls), loop).result(30)
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def ingest_of(
    folder: Path, number: int, replicas: int, sources: Path = ROOT
) -> tuple[Program, int]:
    """A replica of the ingest, and its port. The folder has its certificate and kubeconfig;
    ``sources``: of which version."""
    port = free_port()
    arguments = [
        f"--port={port}", f"--tls-cert={folder / 'tls.crt'}", f"--tls-key={folder / 'tls.key'}",
        "--lease=bench/ingest", f"--identity=replica-{number}", f"--seats={replicas}",
        "--address=127.0.0.1",
    ]  # fmt: skip
    name, kube = f"ingest-{number}", folder / "kube"
    module = "pipemorph_operator.ingest"
    return Program(name, module, arguments, folder, kube, sources=sources), port


def wait_until_all_serve(ingests: Sequence[Program]) -> None:
    """Each has read which jobs are its own."""
    deadline = time.monotonic() + SEATED
    while not all(each.metric("pipemorph_ingest_members") == len(ingests) for each in ingests):
        if time.monotonic() > deadline:
            said = ", ".join(each.says().strip() for each in ingests)
            raise TimeoutError(f"not all replicas serve within {SEATED:g} s: {said}")
        time.sleep(0.2)


def taken_by(ingests: Sequence[Program]) -> list[float]:
    """Processor time of each, without its planners."""
    return [cpu_seconds(each.process.pid) for each in ingests]


def run(sizes: list[int], replicas: int = 1) -> Result:
    names = [f"j{i}" for i in range(len(sizes))]
    specs = {name: job_of(stages, name)["spec"] for name, stages in zip(names, sizes, strict=True)}
    api = PlayedApi(specs)
    gone_at = SETTLE + QUIET
    with tempfile.TemporaryDirectory(prefix="bench-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        crt, key = certificate(folder)
        api_port = stack.enter_context(played_api(api, crt, key))
        kubeconfig(folder / "kube", api_port, crt)
        ingests, ports = [], []
        for number in range(replicas):
            ingest, port = ingest_of(folder, number, replicas)
            stack.callback(ingest.process.stop)
            ingest.start()
            ingests.append(ingest)
            ports.append(port)
        wait_until_all_serve(ingests)
        jobs = [
            {"namespace": NAMESPACE, "name": n, "token": token(n), "stages": s, "seed": 0}
            for n, s in zip(names, sizes, strict=True)
        ]
        with load(
            port=ports[0], others=ports[1:], server_name=NAME, ca_file=str(crt), jobs=jobs,
            period=PERIOD, seconds=gone_at + RESTART, gone_at=gone_at, first=MORE_THAN_SENT,
        ) as figures:  # fmt: skip
            began = time.monotonic()
            connected = sum(taken_by(ingests))
            time.sleep(SETTLE)
            before, asked = taken_by(ingests), dict(api.asked)
            time.sleep(gone_at - 0.5 + began - time.monotonic())
            each = [now - then for now, then in zip(taken_by(ingests), before, strict=True)]
            taken, seconds = sum(each), time.monotonic() - began - SETTLE
            writes = {k: (v - asked.get(k, 0)) / seconds for k, v in api.asked.items()}
            memory = [resident_bytes(ingest.process.pid) / 2**20 for ingest in ingests]
            owned = [ingest.metric("pipemorph_ingest_jobs") for ingest in ingests]
            time.sleep(gone_at + LET_BE + began - time.monotonic())
            victim, heir = ingests[-1], ingests[0]
            inherited = cpu_seconds(heir.process.pid) if replicas > 1 else 0.0
            victim.kill()
            killed, asked = time.monotonic(), dict(api.asked)
            if replicas == 1:
                victim.start()
            busy = []
            while time.monotonic() < began + gone_at + RESTART - 1:
                used = cpu_seconds(heir.process.pid) - inherited
                busy.append((time.monotonic() - killed, used))
                time.sleep(0.2)
            found = figures()
    back = [seconds - LET_BE for seconds in found["back"]]
    lost = int(owned[-1])
    last = max(back) if len(back) == lost else math.inf
    return {
        "jobs": len(sizes),
        "us_per_report": 1e6 * taken / seconds / (found["reports"] / found["wall"]),
        "load_us_per_report": 1e6 * found["own_cpu"] / found["reports"],
        "cores": taken / seconds,
        "reports_per_second": found["reports"] / found["wall"],
        "answer_p50_ms": 1e3 * quantile(found["answers"], 0.5),
        "answer_p99_ms": 1e3 * quantile(found["answers"], 0.99),
        "memory_mib": max(memory),
        **{f"replica_{i}_cores": used / seconds for i, used in enumerate(each)},
        **{f"replica_{i}_mib": mib for i, mib in enumerate(memory)},
        **{f"replica_{i}_jobs": count for i, count in enumerate(owned)},
        "replicas": replicas,
        "lost": lost,
        "writes_per_second": writes.get("apply", 0.0),
        "reviews_per_second": writes.get("review", 0.0),
        "connect_ms_per_job": 1e3 * connected / len(sizes),
        "missing": lost - len(back),
        "back_p50_seconds": quantile(back, 0.5) if back else math.inf,
        "back_last_seconds": last,
        "back_cpu_seconds": next((cpu for at, cpu in busy if at >= last), busy[-1][1]),
        "reviews_after_restart": api.asked.get("review", 0) - asked.get("review", 0),
    }


def table(found: Result) -> str:
    """What docs/benchmarks.md quotes."""
    rows = [
        (
            f"processor time of a report of {found['jobs']:.0f} jobs, with all that is done beside"
            " (of the load generator)",
            f"{found['us_per_report']:.0f} µs ({found['load_us_per_report']:.0f} µs)",
        ),
        (
            "reports per second, processors busy; answered within, p50 / p99",
            f"{found['reports_per_second']:.0f}, {found['cores']:.2f};"
            f" {found['answer_p50_ms']:.1f} / {found['answer_p99_ms']:.0f} ms",
        ),
        (
            "memory" + (", the most" if found["replicas"] > 1 else ""),
            f"{found['memory_mib']:.0f} MiB",
        ),
        *(
            (
                f"replica {i}: jobs; processors busy; memory",
                f"{found[f'replica_{i}_jobs']:.0f}; {found[f'replica_{i}_cores']:.2f};"
                f" {found[f'replica_{i}_mib']:.0f} MiB",
            )
            for i in range(int(found["replicas"]))
            if found["replicas"] > 1
        ),
        ("writes of status per second", f"{found['writes_per_second']:.1f}"),
        (
            "processor time until a job that comes is answered",
            f"{found['connect_ms_per_job']:.1f} ms",
        ),
        (
            ("killed and started" if found["replicas"] == 1 else "one killed, others take over")
            + f": half, and all of its {found['lost']:.0f} jobs are answered again",
            f"{found['back_p50_seconds']:.1f} s, {found['back_last_seconds']:.1f} s",
        ),
        ("… processor time until then", f"{found['back_cpu_seconds']:.1f} s"),
    ]
    lines = ["| one ingest | |", "|---|---:|", *(f"| {what} | {figure} |" for what, figure in rows)]
    return "\n".join(lines)


def goals(found: Result) -> list[tuple[str, bool]]:
    """What is promised with what was measured, and whether it holds."""
    return [
        (
            f"processor time of a report ≤ {MOST_US:.0f} µs: {found['us_per_report']:.0f}",
            found["us_per_report"] <= MOST_US,
        ),
        (
            f"memory ≤ {MOST_MIB:.0f} MiB: {found['memory_mib']:.0f}",
            found["memory_mib"] <= MOST_MIB,
        ),
        (
            f"all are answered again ≤ {MOST_BACK:.0f} s after a restart:"
            f" {found['back_last_seconds']:.1f}",
            found["back_last_seconds"] <= MOST_BACK,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--stages", type=int, help="of all jobs (default: 2, 8 and 64, mixed)")
    parser.add_argument("--replicas", type=int, default=1, help="of the ingest (default: 1)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal does not hold")
    options = parser.parse_args()
    sizes = [options.stages] * options.jobs if options.stages else mixed(options.jobs)
    found = run(sizes, options.replicas)
    print(table(found) + "\n")
    kept = goals(found)
    for text, holds in kept:
        print(f"{text} {'holds' if holds else 'DOES NOT HOLD'}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if options.check and not all(holds for _, holds in kept) else 0


if __name__ == "__main__":
    sys.exit(main())
