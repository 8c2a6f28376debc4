"""Programs of a test cluster: where they come from, how they are built, and how they run."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from testbed import NotYet, TestbedError, tools, wait_for
from testbed.processes import Process

# Bound here: a test may put something else in place of one of them.
CACHED = (tools._go, tools.module_version)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, whatever the machine has."""
    # The compiler's own cache is not the one under test, and slow to fill.
    if "GOCACHE" not in os.environ:
        monkeypatch.setenv("GOCACHE", str(tools.cache_root().parent / "go-build"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()


def test_a_program_that_is_not_built_names_the_testbed_and_the_command() -> None:
    with pytest.raises(TestbedError) as refused:
        tools.find("kubelet")
    version = tools.module_version("kubernetes")
    assert str(refused.value) == (
        f"testbed nodes is not ready: kubelet {version} is not built; run `make testbeds`"
    )


def module(folder: Path, *, source: str = "package main\nfunc main() { println(1) }\n") -> None:
    folder.mkdir(parents=True)
    (folder / "go.mod").write_text("module example.org/probe\ngo 1.24\n")
    (folder / "main.go").write_text(source)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A module of one small program in place of the pinned ones."""
    if shutil.which("go") is None and not tools.GO_ELSEWHERE.exists():
        pytest.skip("found no go command: what this test checks is not checked")
    folder = tmp_path / "modules" / "probe"
    module(folder)
    module(tmp_path / "modules" / "kubernetes")
    monkeypatch.setattr(tools, "MODULES", tmp_path / "modules")
    monkeypatch.setattr(tools, "TOOLS", {"probe": tools.Tool("probe", ".")})
    monkeypatch.setattr(tools, "PROGRAMS", {"probes": ("probe",)})
    monkeypatch.setattr(tools, "module_version", lambda _: "v1.2.3")
    monkeypatch.setattr(tools, "_VERSIONED", {"probe": "example.org/probe"})
    return folder


def built(say: Callable[[str], None] = lambda _: None) -> Path:
    tools.build("probe", say, time.monotonic() + 600.0)
    return tools.find("probe")


@pytest.mark.timeout(600)  # Go's own cache may be empty, and its packages are built first
def test_a_program_is_built_once_and_again_when_its_source_changes(probe: Path) -> None:
    said: list[str] = []
    first = built(said.append)
    assert any(line.startswith("building probe v1.2.3") for line in said)
    assert not (first.parent.parent / "building").exists()
    said.clear()
    assert built(said.append) == first and not said
    (probe / "main.go").write_text("package main\nfunc main() { println(2) }\n")
    with pytest.raises(TestbedError, match=r"probe v1\.2\.3 is not built"):
        tools.find("probe")
    assert built(said.append) != first and said


@pytest.mark.timeout(600)
def test_a_build_that_fails_shows_the_compiler_and_leaves_no_program(probe: Path) -> None:
    (probe / "main.go").write_text("package main\nfunc main() { undefined() }\n")
    with pytest.raises(TestbedError, match=r"(?s)building probe.*failed.*undefined: undefined"):
        built()
    assert not tools.located("probe").exists()


def test_a_wait_names_what_was_missing() -> None:
    def check() -> None:
        raise NotYet("found 1 pod, expected 4")

    with pytest.raises(TestbedError) as missed:
        wait_for("pods", check, 0.05, interval=0.01, details=lambda: "the log's end")
    for part in ("for pods", "found 1 pod, expected 4", "the log's end"):
        assert part in str(missed.value)


def test_a_process_that_ends_early_is_not_waited_for(tmp_path: Path) -> None:
    process = Process("probe", ["sh", "-c", "echo broken; exit 3"], tmp_path / "log")
    process.start()
    with pytest.raises(TestbedError, match=r"(?s)exit status 3 before its answer.*broken"):
        process.wait_until("its answer", lambda: None, 30.0)
    process.stop()


def test_a_process_outlives_the_thread_that_started_it_and_not_its_process(tmp_path: Path) -> None:
    """The kernel kills it with the thread that forked it, so that thread must stay."""
    command = "trap 'echo alive' USR1; echo started; while :; do sleep 600 & wait; done"
    log = tmp_path / "log"
    process = Process("probe", ["sh", "-c", command], log)
    thread = Thread(target=process.start)
    thread.start()
    thread.join()
    # The kernel sends its signal before it takes away the thread's entry.
    entry = Path(f"/proc/self/task/{thread.native_id}")
    wait_for("the thread's end", lambda: not entry.exists(), 30.0, interval=0.01)
    process.wait_until("its trap", lambda: "started" in log.read_text(), 30.0)
    os.kill(process.pid, signal.SIGUSR1)
    process.wait_until("its answer", lambda: "alive" in log.read_text(), 30.0)
    process.stop()
    started = (
        "import os, sys; from pathlib import Path; from testbed.processes import Process;"
        "process = Process('probe', ['sleep', '600'], Path(sys.argv[1])); process.start();"
        "print(process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", started, str(tmp_path / "log")],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    wait_for("the program's end", lambda: not _runs(int(done.stdout)), 30.0)


def _runs(pid: int) -> bool:
    """True if the process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"
