"""The output of a rank, as its host shows and keeps it."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from waiting import until

from pipemorph.local.processes.rank_log import KEPT_BYTES, LONGEST_LINE, PrefixedLog

DEADLINE = 20.0


def test_lines_of_two_ranks_are_not_mixed() -> None:
    output = io.BytesIO()
    logs = [PrefixedLog(f"[rank {i}] ", output) for i in range(2)]
    ends = [log.open() for log in logs]
    os.write(ends[0], b"half of ")
    os.write(ends[1], b"one\ntwo\n")
    os.write(ends[0], b"a line\n")
    for end in ends:
        os.close(end)
    until(lambda: output.getvalue().count(b"\n") == 3, "all lines")
    assert sorted(output.getvalue().decode().splitlines()) == [
        "[rank 0] half of a line", "[rank 1] one", "[rank 1] two",
    ]  # fmt: skip
    assert logs[1].lines() == ["one", "two"]


def test_the_output_of_an_ended_rank_is_complete_while_its_child_runs() -> None:
    log = PrefixedLog("", io.BytesIO())
    end = log.open()
    script = "import os, subprocess, sys; subprocess.Popen(['sleep', '60']); print('x' * 50000);"
    script += "print('the reason', end='', flush=True); os._exit(3)"
    rank = subprocess.Popen([sys.executable, "-c", script], stdout=end, start_new_session=True)
    os.close(end)
    try:
        assert rank.wait(DEADLINE) == 3
        log.finish()
        assert log.lines()[-1] == "the reason"
    finally:
        os.killpg(rank.pid, 9)


def test_what_is_kept_is_bounded_and_endless_lines_are_cut() -> None:
    output = io.BytesIO()
    log = PrefixedLog("> ", output)
    end = log.open()
    for i in range(3000):
        os.write(end, f"line {i} {'.' * 90}\n".encode())
    os.write(end, b"\r" * 3 * LONGEST_LINE)
    os.close(end)
    until(lambda: output.getvalue().count(b"\r") == 3 * LONGEST_LINE, "the last line")
    log.finish()
    kept = log.lines()
    assert sum(map(len, kept)) <= KEPT_BYTES
    assert kept[0].startswith("line "), "the newest of them"
    assert not any(line.startswith("line 0 ") for line in kept)
    assert output.getvalue().startswith(b"> line 0 ")
