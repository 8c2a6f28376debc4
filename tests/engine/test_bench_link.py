"""`pipemorph bench link`: both ends here, two ends that meet, and what it refuses."""

import json
import os
import re
import subprocess
import sys

import pytest

from pipemorph.cli import main
from pipemorph_trainer.bench import link as bench
from pipemorph_trainer.bench import transfers

pytestmark = pytest.mark.timeout(400)

QUICK = ["--sizes", "4K,1M", "--rounds", "1", "--volume", "4M", "--pings", "50"]


def start(*arguments, env=None):
    return subprocess.Popen(
        [sys.executable, "-m", "pipemorph.cli", "bench", "link", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )


def finish(process):
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_both_ends_on_this_host():
    transports = ["tcp", "shm", "gloo"]
    status, out, err = finish(
        start(*QUICK, "--transports", ",".join(transports), "--output", "json")
    )
    assert status == 0, err
    report = json.loads(out)
    assert [t["transport"] for t in report["transports"]] == transports
    for t in report["transports"]:
        assert t["unavailable"] is None
        assert [p["size"] for p in t["throughput"]] == [4096, 1 << 20]
        for point in t["throughput"]:
            assert 0 < point["slowest"] <= point["gb_per_s"] <= point["fastest"]
            # The copy into the receiver's tensor alone bounds it.
            assert point["fastest"] < 500
        assert 0 < t["latency"]["p50"] <= t["latency"]["p99"] < 5
    text = bench.show(report)
    assert re.search(r"\| message +\| +tcp \| +shm \| +gloo \|", text)
    assert "4 KiB one way, p99" in text
    nothing = [{"transport": "rdma", "unavailable": "no rail"}]
    assert bench.show(report | {"transports": nothing}) == "rdma: unavailable: no rail"
    assert bench.show(report | {"transports": [*report["transports"], *nothing]}).endswith(
        "µs |\nrdma: unavailable: no rail"
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ends_that_meet_by_what_the_first_prints():
    listener = start("--listen", "127.0.0.1", "--port", "29613", *QUICK)
    try:
        said = ""
        while "--connect" not in said:
            part = listener.stdout.readline()
            assert part, listener.stderr.read()
            said += part
        found = re.search(r"(\w+)=(\S+) pipemorph bench link --connect \S+ --port (\d+)", said)
        assert found, said
        port = found[3]
        # Somebody without the secret is shown the door, and the listener goes on waiting.
        status, _, err = finish(
            start(
                *("--connect", "127.0.0.1", "--port", port, "--wait", "20", *QUICK),
                env={found[1]: "a guess"},
            )
        )
        assert status == 1
        assert "refused: authentication failed" in err
        assert "Traceback" not in err
        # shm needs no more than one host; that no rail is here is said and not papered over.
        status, out, err = finish(
            start(
                *("--connect", "127.0.0.1", "--port", port, "--transports", "rdma,tcp"),
                *(*QUICK, "--output", "json"),
                env={found[1]: found[2]},
            )
        )
        report = json.loads(out)
        rdma, tcp = report["transports"]
        assert tcp["unavailable"] is None
        assert (status == 0) == (rdma["unavailable"] is None)
        assert finish(listener)[0] == 0
    finally:
        listener.kill()
        listener.communicate()


@pytest.mark.slow
def test_nobody_there_is_one_line():
    status, out, err = finish(start("--connect", "127.0.0.1", "--port", "9", "--wait", "1"))
    assert status == 1
    assert not out
    assert err.startswith("pipemorph bench link: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--transports", "tcp,ucx"], "'ucx' is none of"),
        (["--sizes", "4K,big"], "'big' is not a size"),
        (["--sizes", "0"], "'0' is not a size"),
        (["--volume", "9999999G"], "more than 1024G"),
        (["--window", "0"], "--window: 0"),
        (["--port", "70000"], "--port: 70000"),
        (["--wait", "nan"], "--wait: nan"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, named, capsys):
    assert main(["bench", "link", *arguments]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_percentiles_are_nearest_rank():
    samples = [float(n) for n in range(1, 101)]
    assert transfers.percentile(samples, 50) == 50
    assert transfers.percentile(samples, 99) == 99
    assert transfers.percentile([3.0], 99) == 3
    assert transfers.percentile([2.0, 1.0], 50) == 1
