"""The engine's benchmarks run, and their checks notice what they are for."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
MOST_BUSY = 0.05
"""Of a core, by an idle process. The promise is less."""
MEASUREMENTS = 3
"""The best counts: what a machine takes from a process in a second may count as its own time."""


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


@pytest.fixture(scope="module")
def idle():
    spec = importlib.util.spec_from_file_location("engine_idle", BENCHMARKS / "engine_idle.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.times
@pytest.mark.timeout(300)
def test_idle_links_cost_no_core_and_as_much_memory_as_the_formula_says(tmp_path, idle):
    report = tmp_path / "idle.json"
    # Not a multiple of a page, and less than a huge page in all.
    shape = ["--links", 4, "--slots", 3, "--slot-bytes", 300_001]
    for _ in range(MEASUREMENTS):
        run("engine_idle", "--seconds", 1, *shape, "--json", report)
        said = json.loads(report.read_text())
        if all(row["busy"] < MOST_BUSY for row in said["rows"]):
            break
    assert said["mapped_bytes"] == 3 * 303_104
    assert [(r["links"], r["transport"]) for r in said["rows"]] == [
        *((1, "tcp"), (4, "tcp"), (1, "shm"), (4, "shm")),
    ]
    for row in said["rows"]:
        assert 0 < row["busy"] < MOST_BUSY, row
        assert row["wakeups"] > 0
    memory = [c for c in said["checks"] if "MiB" in c["what"]]
    assert len(memory) == 8
    assert all(c["holds"] for c in memory), memory


def test_a_busy_core_and_a_leak_do_not_hold(idle):
    row = {
        "transport": "tcp",
        "links": 1,
        "busy": 0.001,
        "receiver_slot_bytes": 8 << 20,
        "sender_slot_bytes": 0,
    }
    assert idle.slot_memory(8, 1 << 20) == 8 << 20
    assert idle.slot_memory(1, (2 << 20) + 1) == 4 << 20

    def holds(**changes):
        return [h for _, h in idle.checks([row | changes], 8 << 20)]

    assert holds() == [True, True, True]
    assert holds(busy=1.0) == [False, True, True]
    assert holds(receiver_slot_bytes=16 << 20) == [True, False, True]
    assert holds(sender_slot_bytes=8 << 20) == [True, True, False]
    assert holds(transport="shm") == [True, True, False]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_contest_names_every_peer_and_says_what_holds(tmp_path):
    report = tmp_path / "engine.json"
    size = ["--size", 1 << 20, "--messages", 4, "--rounds", 2, "--pings", 20]
    out = run("engine", *size, "--only", "tcp/shm", "--json", report)
    said = json.loads(report.read_text())
    peers = ["memcpy", "gloo", "iperf3, 4 streams", "iperf3, 1 stream"]
    assert {r["contender"] for r in said["rows"]} == {*peers, "tcp", "shm"}
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
        ("tcp", "iperf3, 4 streams"): 0.95,
        ("tcp", "iperf3, 1 stream"): 0.95,
        ("tcp", "gloo"): 1.3,
        ("shm", "gloo"): 2.0,
        ("shm", "memcpy"): 0.8,
        ("copied", "trainer"): 3.0,
    }
    copies = {row["way"]: row["engine_copies"] for row in said["handover"]}
    assert copies == {"copied": 2, "leased": 0, "trainer": 0, "trainer, from its tensor on": 0}
    for c in said["checks"]:
        verdict = "holds" if c["holds"] else "DOES NOT HOLD"
        assert (
            f"{c['contender']} ≥ {c['promised']} × {c['base']}: {c['measured']:.2f} {verdict}"
            in out
        )
