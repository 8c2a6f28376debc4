"""The engine's benchmarks run, and their checks notice faults."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_contest_names_every_peer_and_says_what_holds(tmp_path):
    report = tmp_path / "engine.json"
    size = ["--size", 1 << 20, "--messages", 4, "--rounds", 2, "--pings", 20]
    out = run("engine", *size, "--only", "tcp/shm", "--json", report)
    said = json.loads(report.read_text())
    assert {r["contender"] for r in said["rows"]} == {"memcpy", "gloo", "tcp", "shm"}
    assert all(r["gb_per_s"] > 0 and r["cpu_ns_per_kb"] > 0 for r in said["rows"])
    latencies = ["gloo", "tcp", "shm", "tcp, polled", "shm, polled", "raw TCP", "raw Unix socket"]
    assert [d["contender"] for d in said["latency"]] == latencies
    p50 = {d["contender"]: d["p50_us"] for d in said["latency"]}
    of_raw = {d["contender"]: d["of_raw"] for d in said["latency"] if d["of_raw"] is not None}
    assert of_raw == {
        name: p50[name] / p50["raw TCP" if "tcp" in name else "raw Unix socket"]
        for name in ("tcp", "shm", "tcp, polled", "shm, polled")
    }
    assert all(0 < d["p50_us"] <= d["p99_us"] for d in said["latency"])
    promised = {(c["contender"], c["base"]): c["promised"] for c in said["checks"]}
    assert promised == {
        ("tcp", "gloo"): 1.1,
        ("shm", "gloo"): 2.0,
        ("shm", "memcpy"): 0.8,
        ("copied", "leased"): 3.0,
    }
    copies = {row["way"]: row["engine_copies"] for row in said["handover"]}
    assert copies == {"copied": 2, "leased": 0, "trainer": 1}
    for c in said["checks"]:
        goal = f"{c['contender']} ≥ {c['promised']} × {c['base']}: {c['measured']:.2f}"
        assert f"{'ok ' if c['holds'] else 'NO '} {goal}\n" in out
