"""Jobs without torch for the local host: what each rank does is in its arguments."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import prepared_processes
from manifests import manifest_of
from waiting import until

T = TypeVar("T")
DEADLINE = 60.0
MARK = "LOCAL_HOST_TEST"

FAKE_RANK = '''
"""A rank that follows a script: {"ranks": {"2": "die 3"}}; the others hang."""
import json, os, shutil, signal, subprocess, sys, threading
from pathlib import Path

args = json.loads(os.environ["PIPEMORPH_ARGS"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["PIPEMORPH_ATTEMPT"])
meeting = Path(args["meeting"]) / str(attempt)
meeting.mkdir(parents=True, exist_ok=True)
action, *rest = args["ranks"].get(str(rank), args.get("others", "hang")).split()

def seen():
    private = {}
    for name in ("PIPEMORPH_SECRET_FILE", "PIPEMORPH_TOKEN_FILE", "PIPEMORPH_JOB_FILE"):
        path = Path(os.environ[name])
        private[name] = [oct(path.stat().st_mode & 0o777), path.read_bytes().hex()]
    return {"env": dict(os.environ), "files": private, "pid": os.getpid(), "cwd": os.getcwd(),
            "folder": oct(path.parent.stat().st_mode & 0o777)}

def last_word(*_):
    print(f"terminated: stage {rank} was waiting for F of microbatch 3 of iteration 7 from "
          f"stage {rank - 1} on link {rank - 1} (direct), 2.1 s", file=sys.stderr, flush=True)
    os._exit(143)

if action == "wait":
    signal.signal(signal.SIGTERM, last_word)
    signal.signal(signal.SIGUSR2, last_word)
if action in ("stubborn", "cling"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
if action == "parent":
    own = {"session": {"start_new_session": True}, "group": {"process_group": 0}}
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    subprocess.Popen(sleep, **own.get(rest[0] if rest else "", {}))
if action == "daemon" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        threading.Event().wait(300)
    os._exit(0)
if action == "note":
    note = Path(os.environ["PIPEMORPH_PROGRESS_DIR"], f"note.rank-{rank}")
    note.write_text("it keeps\\x1b[2J no state\\ncompleted: 5 of 5")
    action = "finish"
print(f"rank {rank} is here", flush=True)
partial = meeting / f".rank-{rank}"
partial.write_text(json.dumps(seen()))
partial.rename(meeting / f"rank-{rank}")

def everyone():
    pause = threading.Event()
    while len(list(meeting.glob("rank-*"))) < world:
        pause.wait(0.01)

everyone()
if action == "finish" or (action in ("recover", "cling") and attempt > 0):
    # State of a closed pipeline; "finish 3": after three of five iterations.
    done = {"rank": rank, "iterations": int(rest[0]) if rest else 5, "faults": []}
    Path(os.environ["PIPEMORPH_TRACE_DIR"], f"faults-rank{rank}.json").write_text(json.dumps(done))
    sys.exit(0)
if action == "leave":
    sys.exit(0)
if action == "recover" and "unlog" in rest:
    shutil.rmtree(Path(os.environ["PIPEMORPH_TRACE_DIR"]).parent)
if action == "recover":
    sys.exit(3)
if action == "die":
    print("the last thing I did", file=sys.stderr, flush=True)
    sys.exit(int(rest[0]))
if action == "lose":
    print(f"rank {rank} (stage {rank}) waited 0.0 s for F of microbatch 3 of iteration 7 from "
          f"stage {rest[0]} on link 1 (direct, gloo); rank {rest[0]} (stage {rest[0]}) is gone: "
          f"its connection closed", file=sys.stderr, flush=True)
    sys.exit(1)
if action == "after":
    # Ends after the rank that has lost it: the host keeps that one as a zombie.
    other = json.loads((meeting / f"rank-{rest[0]}").read_text())["pid"]
    pause = threading.Event()
    while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pause.wait(0.01)
    pause.wait(float(rest[1]))
    print("ValueError: what really happened", file=sys.stderr, flush=True)
    sys.exit(3)
if action == "crash":
    print("about to crash", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
while True:  # In turns: a signal that comes just before a wait is handled after it.
    threading.Event().wait(0.2)
'''


@dataclass
class LocalRun:
    """Run of the fake rank in ``folder`` by ``pipemorph run``."""

    folder: Path
    ranks: dict[int, str]
    others: str = "hang"
    stages: int = 4
    spec: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    executed: bool = False
    """True for a program of its own, instead of a fork of a prepared process."""
    host: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        (self.folder / "fake_rank.py").write_text(FAKE_RANK)
        (self.folder / "job.yaml").write_text(json.dumps(self.manifest()))
        (self.folder / "tmp").mkdir(exist_ok=True)

    def manifest(self) -> dict[str, Any]:
        args = {
            "meeting": str(self.folder / "meeting"),
            "ranks": {str(rank): what for rank, what in self.ranks.items()},
            "others": self.others,
        }
        spec: dict[str, Any] = {
            "parallelism": {"stages": self.stages},
            "schedule": {"microbatches": 8},
            "trainer": {
                "module": "fake_rank",
                # Enough for ranks to be forked; they need no torch.
                "preload": ["fractions"],
                "iterations": 5,
                "args": args,
            },
        }
        return manifest_of(spec | self.spec, "fake")

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def command(self, *extra: str) -> list[str]:
        python = [sys.executable, "-m", "pipemorph.cli", "run"]
        return [*python, "job.yaml", "--out", "out", *extra]

    def environment(self) -> dict[str, str]:
        # A folder of our own for temporary files, to see that none remains.
        ours = {MARK: self.mark, "TMPDIR": str(self.folder / "tmp")}
        return dict(os.environ) | ours | self.env

    def start(self, *extra: str) -> subprocess.Popen[str]:
        """Start it and wait until every rank is up."""
        start = subprocess.Popen if self.executed else prepared_processes.PreparedProcess
        self.host = start(
            self.command(*extra),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        until(lambda: self.all_here() or self.ended, "all ranks up")
        if not self.all_here():
            raise AssertionError(f"it ended before all ranks were up: {self.host.communicate()[0]}")
        return self.host

    @property
    def ended(self) -> bool:
        return self.host is not None and self.host.poll() is not None

    def all_here(self, attempt: int = 0) -> bool:
        meeting = self.folder / "meeting" / str(attempt)
        return len(list(meeting.glob("rank-*"))) == self.stages

    def seen_by(self, rank: int, attempt: int = 0) -> dict[str, Any]:
        path = self.folder / "meeting" / str(attempt) / f"rank-{rank}"
        return json.loads(path.read_text())

    def finish(self, *extra: str) -> tuple[int, str]:
        """Run it to its end: exit status and output."""
        run = subprocess.run if self.executed else prepared_processes.run
        done = run(
            self.command(*extra),
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def report(self) -> dict[str, Any]:
        return json.loads((self.out / "report.json").read_text())

    def processes(self) -> list[int]:
        """Processes on this machine that descend from this run, zombies aside."""
        executed = [pid for pid in _processes() if _has_mark(pid, self.mark)]
        return [*executed, *prepared_processes.forks_in(self.folder)]

    def leftovers(self) -> list[str]:
        """Secrets and other temporary files that are still there."""
        return [str(path) for path in (self.folder / "tmp").rglob("*")]


def _processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _has_mark(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False
