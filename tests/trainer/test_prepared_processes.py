"""Programs that tests fork from a prepared process run as executed ones do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared_processes
import pytest
from launch import ended
from prepared_processes import PreparedProcess
from waiting import until

from pipemorph.local.processes.fork_client import SPAWN

SECONDS = 60.0
SEEN = """
import json, os, signal, sys, tempfile, torch
print("at once", file=sys.stderr)
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "env": dict(os.environ),
    "name": __name__, "file": __file__, "spec": getattr(__spec__, "name", None),
    "main": sys.modules["__main__"].__file__, "stdin": sys.stdin.read(), "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in (1, 2, 3, 13, 15)],
    "temporary": tempfile.gettempdir(), "threads": torch.get_num_threads(),
    "passed": os.read(int(sys.argv[1]), 100).decode(), "original": sys.orig_argv,
}))
sys.exit(7)
"""
STARTS_ONE = """
import os, subprocess, sys
from pathlib import Path
command = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), sys.executable, sys.argv[2]]
other = subprocess.Popen(command)
Path("pids.new").write_text(f"{os.getpid()} {other.pid}")
os.rename("pids.new", "pids")
other.wait()
"""
IS_FORK = """
import os, time
from pathlib import Path
name = Path("/proc/self/cmdline").read_text()
Path("found.new").write_text(f"{os.getppid()} {'prepared_server.py' in name}")
os.rename("found.new", "found")
while True:
    time.sleep(1)
"""


def seen(
    start: Callable[..., Any], pipe: tuple[int, int], folder: Path, *command: str, **options: Any
) -> dict[str, Any]:
    """View of itself that a program prints, and its exit status."""
    reads, writes = pipe
    os.write(writes, b"from a pipe")
    with start(
        [sys.executable, *command, str(reads)], cwd=folder, stdin=subprocess.PIPE, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[reads], **options,
    ) as process:  # fmt: skip
        output, errors = process.communicate("from the test", timeout=SECONDS)
    assert (process.returncode, errors) == (7, "at once\n")
    return json.loads(output)


@pytest.mark.parametrize(
    ("command", "new_session"),
    [
        (("-u", "-m", "seen"), True),
        pytest.param(("-u", "-m", "seen"), False, marks=pytest.mark.full),
        pytest.param(("seen.py",), True, marks=pytest.mark.full),
        pytest.param(("seen.py",), False, marks=pytest.mark.full),
    ],
)
def test_a_program_sees_the_same(
    command: tuple[str, ...], new_session: bool, tmp_path: Path
) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "modules").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {
        "PYTHONPATH": str(tmp_path / "modules"), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    # torch sets it in a process that compiles, as other tests of a session do.
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    options = {"env": env, "start_new_session": new_session}
    pipe = os.pipe()  # A shared pipe: its number is an argument of both.
    try:
        forked = seen(PreparedProcess, pipe, tmp_path, *command, **options)
        executed = seen(subprocess.Popen, pipe, tmp_path, *command, **options)
    finally:
        for descriptor in pipe:
            os.close(descriptor)
    if command[0] == "-u":  # A host forks ranks with this option.
        executed["original"].remove("-u")
    assert forked == executed


@pytest.mark.parametrize(
    ("program", "status", "says"),
    [
        ("raise ValueError('of this batch')", 1, "ValueError: of this batch"),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("import atexit, os; atexit.register(os._exit, 9)", 9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_a_program_ends_with_its_status(
    program: str, status: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(program)
    done = prepared_processes.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == status
    assert says in done.stderr and "prepared" not in done.stderr.replace("prepared_server", "", 1)


def test_a_fork_starts_forks_which_die_with_it(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS_ONE)
    (tmp_path / "other.py").write_text(IS_FORK)
    command = [sys.executable, "starts.py", str(SPAWN), "other.py"]
    with PreparedProcess(command, cwd=tmp_path) as process:
        try:
            for name in ("found", "pids"):
                until((tmp_path / name).exists, f"both programs run: no {name}")
            pid, other = map(int, (tmp_path / "pids").read_text().split())
            assert (tmp_path / "found").read_text() == f"{pid} True"
            assert pid == process.pid
            assert set(prepared_processes.forks_in(tmp_path)) == {pid, other}
        finally:
            process.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
    until(lambda: ended(other), "it ends with the program that started it")


def test_a_program_ends_though_its_child_goes_on(tmp_path: Path) -> None:
    """The child holds the channel to the program's own server open."""
    program = "import os, signal\nif os.fork() == 0:\n    os.close(1), signal.pause()"
    (tmp_path / "program.py").write_text(program)
    try:
        prepared_processes.run(
            [sys.executable, tmp_path / "program.py"], cwd=tmp_path, timeout=SECONDS, check=True
        )
    finally:
        for pid in prepared_processes.forks_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "LD_PRELOAD", "TORCH_LOGS"])
def test_what_is_read_at_imports_makes_a_program_of_its_own(variable: str, tmp_path: Path) -> None:
    program = "from pathlib import Path; print(Path('/proc/self/cmdline').read_text())"
    (tmp_path / "program.py").write_text(program)
    done = prepared_processes.run(
        [sys.executable, tmp_path / "program.py"], env=os.environ | {variable: "3"},
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert "prepared_server" not in done.stdout and "program.py" in done.stdout


def test_a_server_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late answer must not be taken for that to the next request."""
    monkeypatch.setattr(prepared_processes, "FORK_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    stuck = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with theirs:
        before = prepared_processes.server()
        server = prepared_processes.Server(ours, stuck.pid)
        prepared_processes._servers.append(server)
        with pytest.raises(OSError, match=r"did not answer in 0\.1 s"):
            server.fork({}, [])
        assert prepared_processes.server() is before
    assert stuck.wait(60) == 0, "it was reaped with the server"
