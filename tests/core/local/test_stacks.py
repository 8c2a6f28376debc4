"""Ranks that hang print their stacks, also one that is stopped, before any of them ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from pipemorph.local.processes.rank_log import RankFileLog
from pipemorph.local.processes.ranks import RankSet, Reaper
from pipemorph.local.processes.supervision import AttemptResult, Events, RankExited, Supervision
from pipemorph.spec.mesh import MeshShape

RANK = """
import faulthandler, os, signal, socket, sys, threading, time
reader, writer = socket.socketpair()
writer.setblocking(False)
signal.set_wakeup_fd(writer.fileno())
signal.signal(signal.SIGUSR2, lambda *_: None)
faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)

def end():
    reader.recv(1)
    os._exit(143)

threading.Thread(target=end, daemon=True).start()
for _ in range(40):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_a_stopped_rank_prints_its_stacks(tmp_path: Path) -> None:
    events, reaper = Events(), Reaper()
    logs = [tmp_path / str(rank) for rank in range(2)]
    with RankSet(reaper, lambda rank, status: events.put(RankExited(rank, status))) as ranks:
        for rank, log in enumerate(logs):
            position = MeshShape(stages=2).find_coordinate(rank)
            command = [sys.executable, "-c", RANK]
            ranks.start_rank(position, command, os.environ, RankFileLog(log))
        end = time.monotonic() + 30
        while not all("ready" in log.read_text() for log in logs):
            assert time.monotonic() < end, "the ranks have not started"
            time.sleep(0.01)
        ranks.ranks[1].send_signal(signal.SIGSTOP)
        while not ranks.ranks[1].is_stopped:
            assert time.monotonic() < end, "it is not stopped"
            time.sleep(0.01)
        found: AttemptResult = Supervision(
            ranks, events, grace_seconds=10.0, straggler_seconds=60.0, restarts_ranks=True,
            find_hang=lambda: "no iteration was finished",
        ).run()  # fmt: skip
    reaper.close()
    assert found.hang and found.position == ranks.ranks[1].position
    assert "rank 1 (stage 1) is stopped, as by SIGSTOP" in found.waits
    for log in logs:
        assert log.read_text().count("Current thread") == 1, log.read_text()[-500:]
