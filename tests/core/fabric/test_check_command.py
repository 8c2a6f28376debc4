"""`pipemorph fabric check`: its arguments, its probe, and what a host does for others."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.fabric.check import end, probe
from pipemorph.fabric.check.end import Host
from pipemorph.fabric.check.members import joined
from pipemorph.fabric.check.probe import Probe, ProbeFailed
from pipemorph.fabric.check.rendezvous import Listener, connect

SECRET = "0123456789abcdef"
# Answers a request with it, and errs, hangs or ends if told to.
PROGRAM = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "exit":
        sys.exit(3)
    if asked["op"] == "fail":
        asked = {"error": "no  memory\\n"}
    if asked["op"] == "ports":
        asked = {"ports": {"mlx5_0/1": {"mtu": 4096, "max_mtu": 4096}}}
    if asked["op"] == "noise":
        print("noise", flush=True)
    elif asked["op"] != "hang":
        print(json.dumps(asked), flush=True)
""".replace('asked["op"]', 'asked.get("op")')


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plays the probe."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(probe, "PROGRAM", path)
    return path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """mlx5_0 with an active port, mlx5_1 whose port is down."""
    for number, state in ((0, "4: ACTIVE"), (1, "1: DOWN")):
        port = tmp_path / f"sysfs/mlx5_{number}/ports/1"
        put(port / "state", state)
        put(port / "rate", "100 Gb/sec (4X EDR)")
        put(port / "link_layer", "Ethernet")
        put(port / "gids/3", f"0000:0000:0000:0000:0000:ffff:0a00:0{number}01")
        put(port / "gid_attrs/types/3", "RoCE v2")
        put(port / "gid_attrs/ndevs/3", "eth0")
        put(port / "hw_counters/local_ack_timeout_err", "2")
        put(port / "hw_counters/packet_seq_err", "3")
        put(port / "hw_counters/out_of_sequence", "100")
    return tmp_path / "sysfs"


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        status = main(["fabric", "check", *argv])
    except SystemExit as ended:  # argparse's own
        status = int(ended.code or 0)
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    (line,) = said.err.splitlines()
    return line


def secret_file(tmp_path: Path, text: str = SECRET, mode: int = 0o600) -> str:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "one of the arguments --listen --hosts is required"),
        (["--listen", "--hosts", "a"], "argument --hosts: not allowed with argument --listen"),
        (["--hosts", ""], "--hosts is empty"),
        (["--hosts", "a,,b"], "--hosts: '' is not a HOST or HOST:PORT"),
        (["--hosts", "a:0"], "--hosts: 'a:0' is not a HOST or HOST:PORT"),
        (["--hosts", "a b"], "--hosts: 'a b' is not a HOST or HOST:PORT"),
        (["--hosts", "a", "--port", "0"], "--port: 0 is not between 1 and 65535"),
        (["--hosts", "a", "--wait", "nan"], "--wait: nan is not a number of seconds above 0"),
        (["--hosts", "a", "--device", "a/b"], "--device: 'a/b' is not a device such as mlx5_0"),
        (["--hosts", "a", "--gid-index", "256"], "--gid-index: 256 is not between 0 and 255"),
    ],
)
def test_refused_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], line: str
):
    assert line in refusal(capsys, "--secret-file", secret_file(tmp_path), *argv)


def test_secrets_that_protect_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def said(name: str) -> str:
        return refusal(capsys, "--hosts", "a", "--secret-file", name)

    assert "has 5 characters; expected 16 or more" in said(secret_file(tmp_path, "short"))
    assert "can be read by other users (mode 0644)" in said(secret_file(tmp_path, mode=0o644))
    assert "holds no secret" in said(secret_file(tmp_path, ""))
    assert "missing" in said(str(tmp_path / "missing"))


def test_without_pyverbs_it_says_what_to_install(program: Path):
    program.write_text("""print('{"error": "No module named pyverbs"}')""")
    with pytest.raises(InputError) as refused:
        Probe([sys.executable, "/no/python"])
    assert "apt-get install python3-pyverbs" in str(refused.value)
    assert f"{sys.executable}: No module named pyverbs" in str(refused.value)
    assert "/no/python: cannot be run: No such file or directory" in str(refused.value)


def test_the_next_python_runs_the_probe_where_the_first_cannot(program: Path):
    with closing(Probe(["/no/python", sys.executable])) as made:
        assert made.ask({"op": "anything"}) == {"op": "anything"}


def test_a_probe_that_fails_says_why(program: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "ANSWER_SECONDS", 0.2)
    with closing(Probe()) as made:
        with pytest.raises(ProbeFailed, match="no memory"):
            made.ask({"op": "fail"})
        with pytest.raises(ProbeFailed, match="the probe said 'noise'"):
            made.ask({"op": "noise"})
        with pytest.raises(ProbeFailed, match="the probe ended with status 3"):
            made.ask({"op": "exit"})
        with pytest.raises(ProbeFailed, match="the probe has ended"):
            made.ask({"op": "anything"})
    with closing(Probe()) as made:
        with pytest.raises(ProbeFailed, match=r"^the probe did not answer within 0\.2 s$"):
            made.ask({"op": "hang"})
        with pytest.raises(ProbeFailed):
            made.ask({"op": "anything"})


def test_rails_of_this_host(program: Path, sysfs: Path):
    with closing(Host(sysfs=sysfs)) as host:
        active, down = host.rails()
    assert (active.name, active.active, active.mtu) == ("mlx5_0/1", True, 4096)
    assert (active.gid, active.gid_index) == ("::ffff:10.0.0.1", 3)
    assert (down.name, down.active, down.state, down.mtu) == ("mlx5_1/1", False, "DOWN", None)
    for chosen in ("mlx5_1", "mlx5_1:1"):
        with closing(Host([chosen], sysfs=sysfs)) as host:
            assert [rail.name for rail in host.rails()] == ["mlx5_1/1"]
    with pytest.raises(InputError, match=r"no RDMA device mlx5_7 \(found mlx5_0:1, mlx5_1:1\)"):
        Host(["mlx5_7"], sysfs=sysfs)
    with closing(Host(gid_index=4, sysfs=sysfs)) as host:
        assert not any(rail.active for rail in host.rails())


def test_what_was_sent_again_is_read_from_the_sender_s_counters(program: Path, sysfs: Path):
    asked: dict[str, Any] = {"op": "resent", "port": 1}
    with closing(Host(sysfs=sysfs)) as host:
        assert host.ask(asked | {"device": "mlx5_0"}) == {"count": 5}
        assert host.ask(asked | {"device": "mlx5_7"}) == {"count": None}


def test_a_host_serves_another_until_the_end(program: Path, sysfs: Path):
    """Also what is not of the protocol, as a device called ``../``, is answered."""
    with closing(Host(sysfs=sysfs)) as host, Listener("127.0.0.1", 0, SECRET) as listener:
        served: list[bool] = []
        thread = threading.Thread(target=lambda: served.append(listener.serve(host.serve, 20.0)))
        thread.start()
        with ExitStack() as stack:
            (member,) = joined([("127.0.0.1", listener.port)], SECRET, 20.0, stack)
            assert [rail.name for rail in member.rails] == ["mlx5_0/1", "mlx5_1/1"]
            assert member.do({"op": "anything"}) == {"op": "anything"}
            for wrong in ({"op": "fail"}, {"op": "resent"}):
                with pytest.raises(ProbeFailed, match=r"^127\.0\.0\.1: "):
                    member.do(wrong)
            escape = {"op": "resent", "device": "../sysfs/mlx5_0", "port": 1}
            with pytest.raises(ProbeFailed, match="is not a device"):
                member.do(escape)
        thread.join(20.0)
        assert served == [True]


def test_a_host_that_does_not_come_is_named():
    with Listener("127.0.0.1", 0, SECRET) as listener:
        port = listener.port
    with ExitStack() as stack, pytest.raises(InputError) as refused:
        joined([("127.0.0.1", port)], SECRET, 0.01, stack)
    assert str(refused.value).startswith(f"127.0.0.1: no connection to port {port}: ")


def test_a_leader_that_falls_silent_is_given_up(
    program: Path, sysfs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(end, "IDLE_SECONDS", 0.05)
    with closing(Host(sysfs=sysfs)) as host, Listener("127.0.0.1", 0, SECRET) as listener:
        served: list[bool] = []
        thread = threading.Thread(target=lambda: served.append(listener.serve(host.serve, 1.0)))
        thread.start()
        silent = connect("127.0.0.1", listener.port, SECRET, 20.0)
        thread.join(20.0)
        silent.close()
        assert served == [False]
