"""Output of tables, pages and lines to a terminal, and to other files."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_jobs import SLOW, Kubectl, adapted, cluster_job, running
from terminal import Screen, Terminal

from pipemorph.cli import main
from pipemorph.terminal import StreamConsole, make_single_line, make_table, render_parts

HOSTILE = "[bold]a[/bold]\x1b[2J\x1b]0;title\x07\u202eb\x9b31m :bomb: [link=http://x]c[/link]"
SHOWN = "[bold]a[/bold] [2J ]0;title b 31m :bomb: [link=http://x]c[/link]"
TABLE = make_table(["what", "number"], [[HOSTILE, "1"], ["x" * 300, "22"]], right=["number"])


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def sent(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """Returns the output of a table and a line for a terminal of 60 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "60", **environment}.items():
        monkeypatch.setenv(name, value)
    stream = Tty()
    console = StreamConsole(stream)
    console.print(TABLE)
    console.print(make_single_line(HOSTILE * 3))
    return stream.getvalue()


def test_plain_output_has_no_escape_codes_and_no_wrapped_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert render_parts("of two\n  lines", TABLE, HOSTILE) == (
        f"of two\n  lines\nwhat{' ' * 298}number\n{SHOWN}{' ' * (307 - len(SHOWN))}1\n"
        f"{'x' * 300}      22\n{SHOWN.replace('title', 'title ')}\n"
    )


def test_foreign_text_neither_controls_the_terminal_nor_is_markup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen(30, 60)
    text = sent(monkeypatch)
    assert "\x1b[2J" not in text and "\x1b]" not in text and not {*"\x07\x9b\u202e"} & {*text}
    screen.feed(text.replace("\n", "\r\n").encode())
    words = "".join(str(screen).split())
    assert SHOWN.replace(" ", "") in words and words.count("x") >= 300


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_without_colours_nothing_is_styled(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert "\x1b[" in sent(monkeypatch)
    assert "\x1b" not in sent(monkeypatch, **{name: value})


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    Kubectl(tmp_path).has(cluster_job("gpt", running(adapted(), SLOW)))
    yield


@pytest.mark.usefixtures("kubectl")
def test_a_narrow_terminal_has_the_first_columns_and_no_line_of_two() -> None:
    command = [sys.executable, "-m", "pipemorph.cli", "top", "--every", "1"]
    with Terminal(command, 10, 50, {}) as terminal:
        shown = terminal.until(lambda shown: "gpt" in shown, 60.0)
    lines = shown.splitlines()
    assert len(lines) == 4 and lines[2].split() == [
        "NAME",
        "STATE",
        "READY",
        "DONE",
        "LEFT",
        "S/ITER",
    ]


PROBLEM = """
microbatches: 2
stages:
- {forward: 1, backward_input: 1, backward_weight: 1}
- {forward: 1, backward_input: 1, backward_weight: 1}
links: [{delay: 1}]
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_who_waits_sees_what_is_done_and_written(
    terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem, trace, page = (tmp_path / name for name in ("problem.yaml", "t.jsonl", "page.html"))
    problem.write_text(PROBLEM)
    trace.write_text('{"at_iteration": 1, "links": {"0": {"delay_ms": 9}}}\n')
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["replay", str(trace), str(problem), "--iterations", "4", "--out", str(page)]) == 0
    lines = capsys.readouterr().err.splitlines()
    if not terminal:
        assert lines == []
        return
    assert [line for line in lines if line.endswith(": adaptive")] == ["4 iterations: adaptive"]
    assert lines[-1].startswith(f"wrote {page}")
    assert main(["plan", str(problem), "--out", str(page)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"wrote {page}: pipemorph")
