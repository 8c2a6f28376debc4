"""Waits of a rank for a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipemorph_trainer.telemetry.run_queue import RunQueue, compute_crowding

DEADLINE = 30.0


def test_a_rank_waits_where_something_else_computes() -> None:
    """Processes that only compute, two, on one processor: each waits while the other runs."""
    allowed = os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(other.pid, {min(allowed)})
        os.sched_setaffinity(0, {min(allowed)})
        queue = RunQueue()
        waited, until = 0.0, time.monotonic() + DEADLINE
        while waited < 0.05:
            assert time.monotonic() < until, f"waited {waited:.3f} s in {DEADLINE:g} s"
            sum(range(10_000))
            waited += queue.take_waited_seconds() or 0.0
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()


def test_waits_of_all_threads_since_the_last_call(tmp_path: Path) -> None:
    ready, end = threading.Event(), threading.Event()

    def run() -> None:
        ready.set()
        end.wait(DEADLINE)

    def write(thread: threading.Thread, waits: int) -> None:
        folder = tmp_path / str(thread.native_id)
        folder.mkdir(exist_ok=True)
        (folder / "schedstat").write_text(f"123456789 {waits} 42\n")

    main = threading.main_thread()
    write(main, 5_000_000_000)
    queue = RunQueue(tmp_path)
    assert queue.take_waited_seconds() == 0.0
    second = threading.Thread(target=run)
    second.start()
    assert ready.wait(DEADLINE)
    write(second, 7_000_000_000)
    write(main, 5_004_000_000)
    assert queue.take_waited_seconds() == pytest.approx(0.004), (
        "what the second waited before it was seen"
    )
    write(second, 7_003_000_000)
    assert queue.take_waited_seconds() == pytest.approx(0.003)
    end.set()
    second.join(DEADLINE)
    assert queue.take_waited_seconds() == 0.0
    assert RunQueue(tmp_path / "none").take_waited_seconds() is None, "the kernel does not count it"


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 0.25),
        ("1600000 100000", 0.25),
        ("200000 100000", 2),
        ("150000 100000", 8 / 3),
    ],
)
def test_crowding_minds_the_quota_of_the_container(
    quota: str, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod sees its container's group as the root, and all processors of its host."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert compute_crowding(4, tmp_path, tmp_path / "own") == pytest.approx(expected)


def test_without_control_groups_crowding_is_by_affinity(tmp_path: Path) -> None:
    count = len(os.sched_getaffinity(0))
    assert compute_crowding(3 * count, tmp_path, tmp_path / "none") == 3
