"""`pipemorph bench link`: both ends here, two ends that meet, and refusals."""

import argparse
import json
import os
import platform
import re
import socket
import subprocess
import sys

import pytest

from pipemorph.cli import main
from pipemorph.commands import bench as command
from pipemorph.doctor import host
from pipemorph.terminal import render_parts
from pipemorph_trainer.bench import link as bench
from pipemorph_trainer.bench import transfers

pytestmark = pytest.mark.timeout(700)

QUICK = ["--sizes", "4K,1M", "--rounds", "1", "--volume", "4M", "--pings", "50"]


def shown(report):
    return render_parts(*bench.make_report(report))


def start(*arguments, env=None):
    return subprocess.Popen(
        [sys.executable, "-m", "pipemorph.cli", "bench", "link", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )


@pytest.fixture
def port():
    """A port reserved for this test. A program may listen there: it shares, and alone listens."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield str(holder.getsockname()[1])


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.full
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
    text = shown(report)
    assert re.search(r"^message +tcp +shm +gloo$", text, re.MULTILINE)
    assert "4 KiB one way, p99" in text
    nothing = [{"transport": "rdma", "unavailable": "no rail"}]
    assert shown(report | {"transports": nothing}) == "rdma: unavailable: no rail\n"
    assert shown(report | {"transports": [*report["transports"], *nothing]}).endswith(
        "µs\nrdma: unavailable: no rail\n"
    )


@pytest.mark.full
def test_two_ends_that_meet_by_what_the_first_prints(port):
    listener = start("--listen", "127.0.0.1", "--port", port, *QUICK)
    try:
        said = ""
        while "--connect" not in said:
            part = listener.stdout.readline()
            assert part, listener.stderr.read()
            said += part
        found = re.search(
            r"(\w+)=(\S+) pipemorph bench link --connect 127\.0\.0\.1 --port (\d+)", said
        )
        assert found, said
        assert found[3] == port
        # A peer without the secret is refused, and the listener goes on waiting.
        status, _, err = finish(
            start(*("--connect", "127.0.0.1", "--port", port, *QUICK), env={found[1]: "a guess"})
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


def run_here(monkeypatch, secret, *arguments):
    """An end in this process, as `pipemorph bench link ARGUMENTS` starts it."""
    monkeypatch.setattr(sys, "argv", ["link", json.dumps(parsed(*arguments, *QUICK))])
    monkeypatch.setenv(bench.SECRET_VARIABLE, secret)
    # This process has other tests to run.
    monkeypatch.setattr(bench.torch, "set_num_threads", lambda _: None)
    return bench.main()


TOO_LARGE = (
    "--window and --sizes: 4 messages of 1048576 bytes do not fit twice, sent and received, into "
    f"the 4194304 bytes of memory of {platform.node()}; connect with smaller ones\n"
)


@pytest.mark.full
def test_a_listener_with_less_memory_says_so_at_both_ends(monkeypatch, capfd, port):
    connector = start(
        *("--connect", "127.0.0.1", "--port", port, *QUICK), env={bench.SECRET_VARIABLE: "a secret"}
    )
    try:
        monkeypatch.setattr(bench, "usable_memory_bytes", lambda: 4 << 20)
        assert run_here(monkeypatch, "a secret", "--listen", "127.0.0.1", "--port", port) == 1
        assert capfd.readouterr().err == f"pipemorph bench link: {TOO_LARGE}"
        status, out, err = finish(connector)
        assert (status, out) == (1, "")
        assert err == f"pipemorph bench link: at the other end: {TOO_LARGE}"
    finally:
        connector.kill()
        connector.communicate()


def test_a_connector_with_less_memory_says_so_before_it_connects(monkeypatch, capfd):
    monkeypatch.setattr(bench, "usable_memory_bytes", lambda: 4 << 20)
    assert run_here(monkeypatch, "a secret", "--connect", "127.0.0.1", "--port", "9") == 1
    assert capfd.readouterr().err == f"pipemorph bench link: {TOO_LARGE}"


def test_memory_that_is_promised_and_not_given_is_one_line(monkeypatch):
    monkeypatch.setattr(bench, "usable_memory_bytes", lambda: 1 << 60)
    with pytest.raises(bench.BenchError) as raised:
        bench.allocate_buffer({"window": 1, "sizes": [1 << 55]}, bench.LISTENER)
    said = str(raised.value)
    assert said.startswith(
        f"--window and --sizes: 1 messages of {1 << 55} bytes: {platform.node()}"
    )
    assert "allocate memory" in said
    assert "\n" not in said


def test_memory_is_what_the_control_group_leaves(tmp_path):
    whole = host.usable_memory_bytes(tmp_path)
    assert whole >= 1 << 28
    for limit, expected in ((f"{1 << 20}\n", 1 << 20), ("max\n", whole), (f"{1 << 60}\n", whole)):
        (tmp_path / "memory.max").write_text(limit)
        assert host.usable_memory_bytes(tmp_path) == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        (
            ">/dev/full",
            "pipemorph bench link: cannot write standard output: No space left on device\n",
        ),
        ("| true", ""),
    ],
)
def test_an_output_that_takes_nothing_is_one_line(redirection, said):
    least = "--transports shm --sizes 4K --rounds 1 --volume 4K --pings 1"
    command = f"{sys.executable} -m pipemorph.cli bench link {least} {redirection}"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == said


@pytest.mark.full
def test_a_missing_peer_is_one_line():
    status, out, err = finish(start("--connect", "127.0.0.1", "--port", "9", "--wait", "1"))
    assert status == 1
    assert not out
    assert err.startswith("pipemorph bench link: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--transports", "tcp,ucx"], "'ucx' is not one of"),
        (["--sizes", "4K,big"], "'big' is not a size"),
        (["--sizes", "0"], "'0' is not a size"),
        (["--sizes", "9" * 5000], "is not a size such as"),
        (["--sizes", "1024G", "--window", "1000"], "do not fit into this host's memory"),
        (["--sizes", ""], "--sizes: is empty"),
        (["--transports", ""], "--transports: is empty"),
        (["--connect", ""], "--connect: is empty"),
        (["--listen", ""], "--listen: is empty"),
        (["--volume", "9999999G"], "more than 1024G"),
        (["--device", "mlx5_0:x"], "--device: 'mlx5_0:x' is not a device"),
        (["--device", "mlx5_0", "--transports", "tcp"], "which --transports excludes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, named, capsys):
    assert main(["bench", "link", *arguments]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return command.validate_options(parser.parse_args(["bench", "link", *arguments]))


def test_rails_are_as_requested_at_this_end(monkeypatch):
    assert parsed()["rdma"] == {
        "rdma_devices": [], "gid_index": -1, "traffic_class": 0, "service_level": 0
    }  # fmt: skip
    options = parsed(
        *("--device", "mlx5_0", "--device", "mlx5_1:2", "--gid-index", "3"),
        *("--traffic-class", "104", "--service-level", "5"),
    )["rdma"]
    # A rail that is named is required, also where no RDMA device is in sight.
    for named in (("--device", "mlx5_0"), ("--gid-index", "3")):
        assert parsed(*named)["required"] == ["rdma"]
        assert "rdma" in parsed(*named)["transports"]
    assert parsed()["required"] == []
    made = []
    monkeypatch.setattr(bench, "Engine", lambda **given: made.append(given))
    bench.create_engine(0, "secret", "0.0.0.0", "rdma", rdma=options)
    bench.create_engine(0, "secret", "0.0.0.0", "tcp", rdma=options)
    over_rails, over_tcp = made
    assert over_rails["require"] == "rdma", "a fallback would be measured instead"
    assert over_rails["rdma_devices"] == ["mlx5_0", "mlx5_1:2"]
    assert (over_rails["gid_index"], over_rails["traffic_class"]) == (3, 104)
    assert over_rails["service_level"] == 5
    assert "rdma_devices" not in over_tcp


@pytest.mark.full
def test_a_rail_that_is_not_there_is_named(capfd):
    """The engine itself names the rail: this holds with and without RDMA on the host."""
    arguments = [*QUICK, "--transports", "rdma", "--device", "nosuch0"]
    assert main(["bench", "link", *arguments]) == 1
    said = capfd.readouterr()
    assert "rdma: unavailable: " in said.out
    assert "Traceback" not in said.err


class PathStats:
    """PathStats as the engine gives them, of a rail that was up and of one that never was."""

    def __init__(self, rail, state, moved, *, rate, rtt, times_lost=0):
        self.kind, self.rail, self.state, self.bytes = "rdma", rail, state, moved
        self.bytes_per_second, self.times_lost = rate, times_lost
        self.rtt_min = self.rtt_mean = self.rtt_p99 = rtt


def test_each_rail_has_a_row_and_what_is_not_known_says_so():
    paths = [
        bench.make_path_record(
            PathStats("mlx5_0 port 1", "UP", 3_000_000_000, rate=12.5e9, rtt=5e-6)
        ),
        bench.make_path_record(
            PathStats("mlx5_1 port 1", "DOWN", 0, rate=None, rtt=None, times_lost=2)
        ),
    ]
    assert paths[0]["gb_per_s_busy"] == 12.5
    assert paths[1]["gb_per_s_busy"] is None
    rdma = {
        "transport": "rdma",
        "unavailable": None,
        "throughput": [{"size": 1 << 20, "gb_per_s": 12.0}],
        "latency": {"p50": 3e-6, "p99": 4e-6},
        "rails": [["mlx5_0 port 1", "mlx5_1 port 1"], ["mlx5_0 port 1"]],
        "rails_error": "mlx5_2 port 1 is not active",
        "paths": paths,
    }
    report = {
        "hosts": ["a", "b"], "window": 4, "rounds": 5, "cores": 8, "load": 0.1,
        "transports": [rdma],
    }  # fmt: skip
    text = shown(report)
    assert "rdma: rails mlx5_0 port 1, mlx5_1 port 1 → mlx5_0 port 1" in text
    assert text.endswith("\nmlx5_2 port 1 is not active\n")
    rows = [line for line in text.splitlines() if line.startswith("mlx5") and "  " in line]
    assert [re.split(r"\s{2,}", row) for row in rows] == [
        ["mlx5_0 port 1", "UP", "3", "12.5", "5 µs", "5 µs", "5 µs", "0"],
        [
            "mlx5_1 port 1", "DOWN", "0", "unavailable", "unavailable", "unavailable",
            "unavailable", "2",
        ],
    ]  # fmt: skip


def test_percentiles_are_nearest_rank():
    samples = [float(n) for n in range(1, 101)]
    assert transfers.compute_percentile(samples, 50) == 50
    assert transfers.compute_percentile(samples, 99) == 99
    assert transfers.compute_percentile([3.0], 99) == 3
    assert transfers.compute_percentile([2.0, 1.0], 50) == 1


def test_what_the_other_end_says_controls_no_terminal():
    class Said(bench.ControlChannel):
        def __init__(self):
            """Has no link."""

        def receive_message(self, timeout=0.0):
            return {"error": "\x1b[2J[bold]gone[/bold]\r\n\x9b31m"}

    with pytest.raises(bench.EngineError) as caught:
        Said().receive_answer()
    assert str(caught.value) == "at the other end: [2J[bold]gone[/bold] 31m"
    report = {
        "hosts": ["\x1b]0;a\x07", "b"], "window": 1, "rounds": 1, "cores": 1, "load": 0.0,
        "transports": [{"transport": "tcp", "unavailable": "\x1b[2J"}],
    }  # fmt: skip
    assert "\x1b" not in shown(report) and "\x07" not in shown(report)
