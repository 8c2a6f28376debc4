"""The output of a rank, as its host shows and keeps it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from pipemorph.local.processes.rank_log import (
    LONGEST_LINE,
    SHOWN_BYTES,
    TAIL_BYTES,
    PrefixedRankLog,
    RankFileLog,
)

DEADLINE = 20.0


def test_lines_of_two_ranks_are_not_mixed() -> None:
    output = io.BytesIO()
    logs = [PrefixedRankLog(f"[rank {i}] ", output) for i in range(2)]
    ends = [log.open_output() for log in logs]
    os.write(ends[0], b"half of ")
    os.write(ends[1], b"one\ntwo\n")
    os.write(ends[0], b"a line\n")
    for end in ends:
        os.close(end)
    until(lambda: output.getvalue().count(b"\n") == 3, "all lines")
    assert sorted(output.getvalue().decode().splitlines()) == [
        "[rank 0] half of a line", "[rank 1] one", "[rank 1] two",
    ]  # fmt: skip
    assert logs[1].read_last_lines() == ["one", "two"]


def test_the_output_of_an_ended_rank_is_complete_while_its_child_runs() -> None:
    log = PrefixedRankLog("", io.BytesIO())
    end = log.open_output()
    script = "import os, subprocess, sys; subprocess.Popen(['sleep', '60']); print('x' * 50000);"
    script += "print('the reason', end='', flush=True); os._exit(3)"
    rank = subprocess.Popen([sys.executable, "-c", script], stdout=end, start_new_session=True)
    os.close(end)
    try:
        assert rank.wait(DEADLINE) == 3
        log.wait_complete()
        assert log.read_last_lines()[-1] == "the reason"
    finally:
        os.killpg(rank.pid, 9)


def test_the_log_in_memory_is_bounded_and_endless_lines_are_cut() -> None:
    output = io.BytesIO()
    log = PrefixedRankLog("> ", output)
    end = log.open_output()
    for i in range(3000):
        os.write(end, f"line {i} {'.' * 90}\n".encode())
    os.write(end, b"\r" * 3 * LONGEST_LINE)
    os.close(end)
    until(lambda: output.getvalue().count(b"\r") == 3 * LONGEST_LINE, "the last line")
    log.wait_complete()
    lines = log.read_last_lines()
    assert sum(map(len, lines)) <= TAIL_BYTES
    assert lines[0].startswith("line "), "the newest of them"
    assert len(lines[-1]) < LONGEST_LINE + TAIL_BYTES, "its beginning"
    assert not any(line.startswith("line 0 ") for line in lines)
    assert output.getvalue().startswith(b"> line 0 ")


def test_a_rank_goes_on_while_the_output_of_its_host_cannot_be_written() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    log = PrefixedRankLog("> ", Full())
    end = log.open_output()
    for _ in range(40):  # More than a pipe holds.
        os.write(end, b"x" * 4095 + b"\n")
    os.write(end, b"the reason\n")
    os.close(end)
    until(lambda: log.read_last_lines()[-1:] == ["the reason"], "the last line")


@pytest.mark.parametrize("size", [SHOWN_BYTES + 1, 1 << 20, 5_000_000])
@pytest.mark.parametrize("after", ["", "[rank1]: the end\n"])
def test_a_long_line_is_cut_and_hides_none_before_it(tmp_path: Path, size: int, after: str) -> None:
    log = RankFileLog(tmp_path / "log")
    os.close(log.open_output())
    head = "Traceback (most recent call last):\n  File x\n"
    (tmp_path / "log").write_text(f"{head}RuntimeError: {'Z' * size}\n{after}")
    trace, file, error, *rest = log.read_last_lines()
    assert (trace, file, rest) == (*head.splitlines(), after.splitlines())
    assert len(error) == SHOWN_BYTES + 3 and error.endswith("Z...")


def test_of_a_large_log_the_last_lines_are_read(tmp_path: Path) -> None:
    log = RankFileLog(tmp_path / "log")
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(100_000)))
    lines = log.read_last_lines()
    assert lines[-1] == "line 99999" and TAIL_BYTES / 2 < sum(map(len, lines)) <= TAIL_BYTES


def test_a_log_that_is_gone_or_truncated_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log"
    os.close(RankFileLog(path).open_output())
    path.write_text("of an earlier attempt\n")
    log = RankFileLog(path)
    assert log.read_last_lines() == []
    path.write_text("short\n")
    assert log.read_last_lines() == ["short"], "somebody has rotated it"
    path.unlink()
    assert log.read_last_lines() == [f"{path} cannot be read: No such file or directory"]
    path.parent.rmdir()
    os.close(log.open_output())
    path.parent.rename(tmp_path / "moved")
    path.parent.write_text("")
    assert log.read_last_lines() == [f"{path} cannot be read: Not a directory"]


@pytest.mark.parametrize(
    ("prefix", "described"),
    [("[rank 3] ", "lines that begin with [rank 3]"), ("", "the log of this pod")],
)
def test_message_says_where_the_lines_of_a_rank_are(prefix: str, described: str) -> None:
    assert str(PrefixedRankLog(prefix, io.BytesIO())) == described
