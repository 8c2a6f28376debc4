"""Forked ranks run like programs of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from pipemorph.local.processes.fork_client import (
    ForkedProcess,
    ForkServer,
    ForkServerManager,
    find_python_arguments,
)

SECONDS = 30.0
PROGRAM = [sys.executable, "-m", "seen"]
Run = Callable[..., tuple[int, str]]

SEEN = """
import atexit, json, os, sys
class Mine: pass
main = sys.modules["__main__"]
atexit.register(print, "at exit")
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[:2], "file": __file__,
    "package": __package__, "spec": getattr(__spec__, "name", None), "mine": main.Mine is Mine,
    "leader": os.getsid(0) == os.getpid(), "parent": os.getppid(), "stdin": sys.stdin.read(),
    "env": sorted(os.environ.items()), "names": sorted(dir(main)), "cwd": os.getcwd(),
    "signals": [str(s) for s in map(__import__("signal").getsignal, (2, 13, 15, 17))],
    "original": sys.orig_argv[1:], "descriptors": sorted(os.listdir("/proc/self/fd")),
}))
sys.exit(len(sys.argv))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs")
    (made / "seen.py").write_text(SEEN)
    return made


@pytest.fixture(scope="module")
def env(folder: Path) -> dict[str, str]:
    return dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def server(env: dict[str, str]) -> Iterator[ForkServer]:
    made = ForkServer(["fractions", "numpy.random"], env)
    assert made.wait_ready(lambda: False) is None
    yield made
    made.close()


@pytest.fixture
def start(
    server: ForkServer, env: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., ForkedProcess]]:
    """Forks a program, with its output in the file ``out``."""
    started: list[ForkedProcess] = []

    def fork(*arguments: str, **own: str) -> ForkedProcess:
        with (tmp_path / "out").open("wb") as output:
            started.append(server.fork_rank(arguments, env | own, output.fileno()))
        return started[-1]

    yield fork
    for process in started:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(SECONDS)


@pytest.fixture
def run(start: Callable[..., ForkedProcess], tmp_path: Path) -> Run:
    def finish(*arguments: str, **own: str) -> tuple[int, str]:
        status = start(*arguments, **own).wait(SECONDS)
        return status, (tmp_path / "out").read_text()

    return finish


@pytest.mark.parametrize("module", [False, True])
def test_a_program_has_the_environment_of_a_python_of_its_own(
    module: bool, run: Run, folder: Path, env: dict[str, str]
) -> None:
    arguments = [*(("-m", "seen") if module else (str(folder / "seen.py"),)), "a", "b c"]
    status, forked = run(*arguments, OWN="7")
    alone = subprocess.run(
        [sys.executable, *arguments],
        env=env | {"OWN": "7"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=False,
        timeout=SECONDS,
    )

    def parsed(output: str) -> dict[str, Any]:
        line, last = output.splitlines()
        assert last == "at exit"
        found: dict[str, Any] = json.loads(line)
        return found

    assert status == alone.returncode == 3, forked
    assert parsed(forked) == parsed(alone.stdout.decode())


@pytest.mark.parametrize(
    ("program", "status", "says"),
    [
        ("raise ValueError('of this batch')", 1, "ValueError: of this batch"),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.abort()", -6, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("def f(:", 1, "SyntaxError"),
    ],
)
def test_a_program_ends_as_in_a_python_of_its_own(
    program: str, status: int, says: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(program)
    found, output = run(str(tmp_path / "program.py"))
    assert found == status, output
    assert says in output and "leak" not in output


def test_a_module_that_is_not_there(run: Run) -> None:
    status, output = run("-m", "not_there")
    assert status == 1
    assert output.strip().endswith("No module named not_there")


def test_ranks_draw_other_random_numbers(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "draw.py"
    program.write_text(
        "import numpy, random; print(random.random(), numpy.random.random(), flush=True)"
    )
    drawn = [number for _ in range(3) for number in run(str(program))[1].split()]
    assert len(set(drawn)) == 6


def test_orphans_of_a_rank_are_the_hosts(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "leave.py"
    program.write_text(
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).pid)"
    )
    orphan = int(run(str(program))[1].split()[0])
    pid, _ = until(lambda: os.waitpid(orphan, 0), "the orphan's end")
    assert pid == orphan


@pytest.mark.parametrize(
    ("module", "says"),
    [("not_there", "No module named 'not_there'"), ("starts_a_thread", "started 1 threads")],
)
def test_modules_that_cannot_be_imported_before(
    module: str, says: str, folder: Path, env: dict[str, str]
) -> None:
    (folder / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    notes: list[str] = []
    with ForkServerManager([module], PROGRAM, env, notes.append) as forks:
        assert forks.wait_for_server(lambda: False) is None
        assert forks.wait_for_server(lambda: False) is None
    (note,) = notes
    assert note.startswith(f"ranks are not forked: {module} cannot") and says in note


def test_a_server_that_was_killed_is_replaced(env: dict[str, str], tmp_path: Path) -> None:
    notes: list[str] = []
    with (
        ForkServerManager(["fractions"], PROGRAM, env, notes.append) as forks,
        (tmp_path / "out").open("wb") as output,
    ):
        first = forks.wait_for_server(lambda: False)
        first._process.kill()
        first._process.wait(SECONDS)
        with pytest.raises(OSError, match=r"has ended|Broken pipe"):
            first.fork_rank(["-m", "seen"], env, output.fileno())
        second = forks.wait_for_server(lambda: False)
        assert second is not None and second is not first
        assert second.fork_rank(["-m", "seen"], env, output.fileno()).wait(SECONDS) == 1
    assert len(notes) == 1 and "starting another one" in notes[0]


@pytest.mark.parametrize(
    ("modules", "command"), [([], PROGRAM), (["fractions"], ["env", *PROGRAM])]
)
def test_no_process_waits_for_programs_that_cannot_be_forked(
    modules: list[str], command: list[str], env: dict[str, str]
) -> None:
    with ForkServerManager(modules, command, env, pytest.fail) as forks:
        assert forks.wait_for_server(lambda: False) is None
        assert forks._server is None


def test_a_wait_for_the_imports_can_be_stopped(env: dict[str, str], folder: Path) -> None:
    (folder / "waits.py").write_text("import time; time.sleep(300)")
    with ForkServerManager(["waits"], PROGRAM, env, pytest.fail) as forks:
        assert forks.wait_for_server(lambda: True) is None


def test_programs_that_can_run_in_a_fork(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    Path(script).touch()
    python = sys.executable
    path = {"PATH": str(Path(python).parent)}
    assert find_python_arguments([python, "-m", "train", "--lr"], {}) == ["-m", "train", "--lr"]
    assert find_python_arguments(["python", script], path) == [script]
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    assert find_python_arguments([python, "-u", script], unbuffered) == [script]
    for other in (
        ["env", python, script],
        [python, "-u", script],
        [python, "-c", "1"],
        [python, "-X", "dev", script],
        [python, script + "c"],
        [python],
        ["/usr/bin/env"],
        ["not-there"],
    ):
        assert find_python_arguments(other, path) is None, other
