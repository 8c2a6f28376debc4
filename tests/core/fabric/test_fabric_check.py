"""`pipemorph fabric check`: its arguments, its probe program, and the hosts that it reaches."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.fabric import hosts, json_process
from pipemorph.fabric.hosts import LocalFabricHost, open_remote, start_probe
from pipemorph.fabric.json_process import JsonProcess, ProbeError

# Plays a device on which everything arrives; errs, hangs or ends by request.
PROGRAM = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    answer = request = json.loads(line)
    if request["op"] == "exit":
        sys.exit("first\\nlast words")
    if request["op"] == "fail":
        answer = {"error": "no  memory\\n"}
    if request["op"] == "ports":
        answer = {"ports": {"mlx5_0/1": 4096}}
    if request["op"] == "open":
        answer = {"id": 1}
    if request["op"] == "write":
        answer = {"bytes": 1e9, "seconds": 0.5, "each": [1e-5, 1e-5, 1e-5]}
    if request["op"] == "noise":
        print("noise", flush=True)
    elif request["op"] != "hang":
        print(json.dumps(answer), flush=True)
""".replace('request["op"]', 'request.get("op")')


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plays the probe."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(hosts, "PROGRAM", path)
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
    return tmp_path / "sysfs"


@pytest.fixture
def shell(program: Path, sysfs: Path, tmp_path: Path) -> str:
    """Plays the remote shell: writes what it is to run, and serves as that host."""
    script = tmp_path / "shell.py"
    script.write_text(
        "import sys\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from pipemorph.fabric import hosts\n"
        f"hosts.PROGRAM = Path({str(program)!r})\n"
        f"Path({str(tmp_path)!r}, sys.argv[1]).write_text(' '.join(sys.argv[2:]))\n"
        "devices = [a.split('=')[1] for a in sys.argv if a.startswith('--device=')]\n"
        f"host = partial(hosts.LocalFabricHost, devices, None, Path({str(sysfs)!r}))\n"
        "sys.exit(hosts.serve_requests(host))\n"
    )
    return f"{sys.executable} {script} {{host}}"


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        status = main(["fabric", "check", *argv])
    except SystemExit as ended:  # argparse's own
        status = int(ended.code or 0)
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "one of the arguments --hosts is required"),
        (["--hosts", ""], "--hosts: '' is not a host"),
        (["--hosts", "a,,b"], "--hosts: '' is not a host"),
        (["--hosts", "a,-oProxyCommand=x"], "--hosts: '-oProxyCommand=x' is not a host"),
        (["--hosts", "a b"], "--hosts: 'a b' is not a host"),
        (["--hosts", "a"], "--hosts: expected two or more"),
        (["--hosts", "a,b,a"], "--hosts: a is there twice"),
        (["--hosts", "a,b", "--shell", "ssh"], "--shell: 'ssh' has no {host}"),
        (["--hosts", "a,b", "--device", "a/b"], "--device: 'a/b' is not a device such as mlx5_0"),
        (["--hosts", "a,b", "--secret-file", "x"], "fabric --secret-file: was removed"),
        (["--listen"], "fabric --listen: was removed; use --hosts"),
    ],
)
def test_refused_arguments(capsys: pytest.CaptureFixture[str], argv: list[str], line: str):
    assert line in refusal(capsys, *argv)


def test_hosts_that_a_remote_shell_reaches_are_checked(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--hosts", "a,b", "--shell", shell, "--device", "mlx5_0"]
    out = tmp_path / "check.json"
    assert main(["fabric", "check", *arguments, "--out", str(out)]) == 0
    assert capsys.readouterr().out == "2 hosts, 2 directions between RDMA ports; problems: 0\n"
    said = json.loads(out.read_text())
    assert {m["source"]["host"]: m["rate"] for m in said["measured"]} == {"a": 2e9, "b": 2e9}
    assert (tmp_path / "a").read_text() == "pipemorph fabric check --serve --device=mlx5_0"
    assert main(["fabric", "check", *arguments]) == 0
    assert "  yes            4096  " in capsys.readouterr().out


def test_hosts_without_an_active_port_are_a_problem(shell: str, capsys: pytest.CaptureFixture[str]):
    arguments = ["--hosts", "a,b", "--shell", shell, "--device", "mlx5_1"]
    assert "no host has an active RDMA port" in refusal(capsys, *arguments)
    line = refusal(capsys, *arguments[:-1], "mlx5_7")
    assert "there is no RDMA device mlx5_7" in line and line.startswith("pipemorph fabric: ")


def test_a_host_that_the_shell_does_not_reach_is_named(
    shell: str, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--hosts", "a,b", "--shell"]
    assert "/no/shell cannot be run: No such file" in refusal(
        capsys, *arguments, "/no/shell {host}"
    )
    ends = "sh -c 'echo no route to {host} >&2; exit 255' {host}"
    assert "ended with status 255: no route to a" in refusal(capsys, *arguments, ends)


def test_this_host_takes_part_without_a_shell(
    shell: str, sysfs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        hosts, "LocalFabricHost", lambda *chosen: LocalFabricHost(*chosen, sysfs=sysfs)
    )
    assert main(["fabric", "check", "--hosts", "localhost,b", "--shell", shell]) == 0
    assert "localhost mlx5_0/1" in capsys.readouterr().out


def test_without_pyverbs_it_names_the_package_to_install(program: Path):
    program.write_text("""print('{"error": "No module named pyverbs"}')""")
    with pytest.raises(InputError) as refused:
        start_probe([sys.executable, "/no/python"])
    assert "apt-get install python3-pyverbs" in str(refused.value)
    assert f"{sys.executable}: No module named pyverbs" in str(refused.value)
    assert "/no/python cannot be run: No such file or directory" in str(refused.value)


def test_the_next_python_runs_the_probe_where_the_first_cannot(program: Path):
    with closing(start_probe(["/no/python", sys.executable])) as made:
        assert made.send_request({"op": "anything"}) == {"op": "anything"}


def test_a_process_that_fails_reports_the_reason(program: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_process, "ANSWER_SECONDS", 0.2)
    command = [sys.executable, str(program)]
    with closing(JsonProcess(command)) as made:
        with pytest.raises(ProbeError, match="no memory"):
            made.send_request({"op": "fail"})
        with pytest.raises(ProbeError, match="wrote 'noise'"):
            made.send_request({"op": "noise"})
    monkeypatch.setattr(json_process, "ANSWER_SECONDS", 20.0)
    with closing(JsonProcess(command)) as made:
        for _ in range(2):
            with pytest.raises(ProbeError, match="ended with status 1: last words"):
                made.send_request({"op": "exit"})
    monkeypatch.setattr(json_process, "ANSWER_SECONDS", 0.2)
    with closing(JsonProcess(command)) as made:
        with pytest.raises(ProbeError, match=r"^no answer within 0\.2 s$"):
            made.send_request({"op": "hang"})
        with pytest.raises(ProbeError):
            made.send_request({"op": "anything"})


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_process, "MAX_LINE", 1000)
    endless = "import sys; sys.stdout.write('x' * 2000); sys.stdout.flush(); sys.stdin.read()"
    with pytest.raises(ProbeError, match="wrote 'xxx"):
        JsonProcess([sys.executable, "-c", endless])


def test_rails_of_this_host(program: Path, sysfs: Path):
    with closing(LocalFabricHost(sysfs=sysfs)) as host:
        active, down = host.list_rails()
    assert (active.name, active.active, active.mtu) == ("mlx5_0/1", True, 4096)
    assert (active.gid, active.gid_index) == ("::ffff:10.0.0.1", 3)
    assert (down.name, down.active, down.state, down.mtu) == ("mlx5_1/1", False, "DOWN", None)
    for chosen in ("mlx5_1", "mlx5_1:1"):
        with closing(LocalFabricHost([chosen], sysfs=sysfs)) as host:
            assert [rail.name for rail in host.list_rails()] == ["mlx5_1/1"]
    with pytest.raises(InputError, match=r"no RDMA device mlx5_7 \(found mlx5_0:1, mlx5_1:1\)"):
        LocalFabricHost(["mlx5_7"], sysfs=sysfs)
    with closing(LocalFabricHost(gid_index=4, sysfs=sysfs)) as host:
        assert not any(rail.active for rail in host.list_rails())


def test_a_remote_host_answers_until_the_check_ends(shell: str):
    with ExitStack() as stack:
        host = open_remote("a", shell, ["pipemorph"], stack)
        assert [rail.name for rail in host.rails] == ["mlx5_0/1", "mlx5_1/1"]
        assert host.send_request({"op": "anything"}) == {"op": "anything"}
        with pytest.raises(ProbeError, match=r"^a: no memory$"):
            host.send_request({"op": "fail"})
        assert host.send_request({"op": "anything"}) == {"op": "anything"}
    with pytest.raises(ProbeError, match=r"^a: ended with status 0$"):
        host.send_request({"op": "anything"})
