"""``pipemorph top`` and ``links`` over a kubectl that prints jobs, and top's screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import SLOW, WELL, Kubectl, adapted, cluster_job, healthy, running, slow_link

from pipemorph.cli import kubectl_plugin, main

GPT = cluster_job("gpt", running(adapted(), SLOW))
SMALL = cluster_job("small", running(healthy(), WELL))
ODD = cluster_job("odd", None, stages="many")


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    made = Kubectl(tmp_path)
    made.has(GPT, SMALL)
    return made


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], ""),
        (["-n", "team"], "--namespace team "),
        (["-A", "--context", "prod"], "--all-namespaces "),
    ],
)
def test_all_jobs_once(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], arguments: list[str], asked: str
) -> None:
    assert main(["top", *arguments]) == 0, "standard output is no terminal"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == ("NAMESPACE" if "-A" in arguments else "NAME")
    assert len(lines) == 3 and "link 2 +60 ms" in lines[1] and "none" in lines[2]
    (call,) = kubectl.asked()
    assert call.startswith(f"get pipemorphjobs.pipemorph.io {asked}--output json")
    assert call.endswith("--context prod") == ("--context" in arguments)


@pytest.mark.parametrize("arguments", [["team/gpt"], ["gpt", "-n", "team"], ["gpt", "--once"]])
def test_one_job_once(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["top", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("team/gpt  Running") and "link 2 (stage 2 to 3)" in shown
    assert "\x1b" not in shown and "trend" not in shown
    (call,) = kubectl.asked()
    assert ("--namespace team" in call) == (arguments != ["gpt", "--once"])


def test_slow_links_alone(kubectl: Kubectl, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["links", "team/gpt"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("links      1 slow link since 03:07:50 UTC") or "2026-01-02" in shown
    assert "link 2 (stage 2 to 3)  +60 ms forward" in shown and "worth" not in shown


def test_slow_links_have_their_trend_if_it_may_look_for_a_while(
    kubectl: Kubectl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As top draws it."""
    monkeypatch.setattr("pipemorph.commands.cluster.links.EVERY_SECONDS", 0.2)
    each = [adapted(slow_link(2, 20.0 * turn), iteration=118 + turn) for turn in (1, 2, 3)]
    kubectl.has(*(cluster_job(f"gpt-{n}", running(told, SLOW)) for n, told in enumerate(each)))
    kubectl.becomes(
        f"#!/bin/sh\ncd {tmp_path}\necho >> asked\nexec cat of-gpt-$(($(wc -l < asked) % 3))\n"
    )
    assert main(["links", "team/gpt", "--seconds", "0.5"]) == 0
    assert re.search(
        r"link 2 \(stage 2 to 3\) .* ms forward +[▁▂▃▄▅▆▇█]{2,}  ", capsys.readouterr().out
    )
    assert len(kubectl.asked()) >= 2


def test_kubectl_runs_it_as_a_plugin(
    kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/kubectl-pipemorph", "top", "team/none"])
    assert kubectl_plugin() == 2
    assert capsys.readouterr().err == (
        "kubectl pipemorph top: team/none: Error from server (NotFound):"
        ' pipemorphjobs.pipemorph.io "none" not found\n'
    )
    monkeypatch.setattr(
        sys, "argv", ["/somewhere/kubectl-pipemorph", "explain", "gpt", "-n", "team"]
    )
    assert kubectl_plugin() == 0
    assert "team/gpt is Running" in capsys.readouterr().out
    assert kubectl.asked()[-1] == (
        "get pipemorphjobs.pipemorph.io gpt --namespace team --output json"
    )


def test_a_job_that_cannot_be_read_hides_no_other(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.has(GPT, ODD)
    assert main(["top"]) == 0
    shown = capsys.readouterr().out
    assert "gpt" in shown and "!          team/odd: spec.parallelism.stages: " in shown
    assert main(["top", "odd"]) == 2
    assert "team/odd: spec.parallelism.stages: " in capsys.readouterr().err
    kubectl.has()
    assert main(["top"]) == 0
    assert capsys.readouterr().out == "no PipeMorphJob was found\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["top", "a/b/c"], "a/b/c: is no name of a job; expected [NAMESPACE/]NAME"),
        (["links", "Gpt"], "Gpt: is no name of a job; expected [NAMESPACE/]NAME"),
        (
            ["top", "team/gpt", "-n", "other"],
            "--namespace: is other; team/gpt names team; give one",
        ),
        (["top", "-A", "-n", "x"], "--all-namespaces: does not go with"),
        (["top", "--every", "0.1"], "--every: is 0.1; expected 1 to 3600 seconds"),
        (["links", "team/gpt", "--seconds", "601"], "--seconds: is 601; expected 0 to 600"),
        (["top", "--every", "nan"], "--every: is nan; expected 1 to 3600 seconds"),
        (["top", "--context", "x", "gone"], '"gone" not found'),
    ],
)
def test_what_is_wrong_is_one_line(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith("pipemorph ")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (None, "current namespace: kubectl, which reads a job of a cluster, is not on PATH"),
        ("#!/bin/sh\necho hello\n", "current namespace: kubectl printed no JSON object"),
        ("#!/bin/sh\nexit 7\n", "current namespace: kubectl exited with 7"),
    ],
)
def test_a_kubectl_that_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str | None,
    words: str,
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if program else str(tmp_path))
    if program:
        (tmp_path / "kubectl").write_text(program)
        (tmp_path / "kubectl").chmod(0o755)
    assert main(["top"]) == 2
    assert words in capsys.readouterr().err


def test_a_kubectl_that_does_not_answer(
    kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipemorph.commands.cluster.kubectl.SECONDS", 0.2)
    kubectl.becomes("#!/bin/sh\nexec sleep 100\n")
    assert main(["top"]) == 2
    assert (
        "kubectl did not answer within 0.2 s; is the cluster reachable?" in capsys.readouterr().err
    )


# --- the screen ------------------------------------------------------------------------------

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")


class Screen:
    """A program on a terminal of 100 × 30."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.terminal = terminal
        self.before = termios.tcgetattr(terminal)
        self.program = subprocess.Popen(
            [sys.executable, "-m", "pipemorph.cli", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
        )
        self.raw = ""

    def until(self, text: str, seconds: float = 60.0, *, raw: bool = False) -> str:
        """What was written until ``text`` came, and forgets it. ``raw``: with control sequences."""
        deadline = time.monotonic() + seconds
        while text not in ANSI.sub("", self.raw):
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], (
                f"{text!r} did not come within {seconds} s, but {self.raw!r}"
            )
            self.raw += os.read(self.master, 65536).decode(errors="replace")
        written, self.raw = self.raw, ""
        return written if raw else ANSI.sub("", written)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self) -> int:
        return self.program.wait(30)

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait()
        os.close(self.master)
        os.close(self.terminal)


@pytest.fixture
def screens(kubectl: Kubectl) -> Iterator[Any]:
    opened: list[Screen] = []

    def open_screen(*arguments: str, **environment: str) -> Screen:
        opened.append(Screen(*arguments, **environment))
        return opened[-1]

    yield open_screen
    for each in opened:
        each.close()


def test_the_screen_follows_the_cluster_and_keys(kubectl: Kubectl, screens: Any) -> None:
    screen = screens("top", "--every", "1")
    assert "> gpt" in re.sub(" +", " ", screen.until("q quit"))
    screen.press("\x1b[B")
    screen.until(">  small")
    screen.press("\x1b[A\x1b[A")
    screen.until(">  gpt")
    # Terminals send several keys at once; ^Z would leave the shell on this screen.
    screen.press("\x1b[B\x1b[Z\x1a\x1b[B")
    screen.until(">  small")
    screen.press("kk")
    screen.until(">  gpt")
    screen.press("\r")
    assert "iteration  118 of 1,000" in screen.until("b back")
    kubectl.has(cluster_job("gpt", running(adapted(iteration=130, iteration_seconds=0.4), SLOW)))
    assert "iteration  130 of 1,000" in screen.until("as seen since top started")
    kubectl.becomes("#!/bin/sh\necho no route to host >&2\nexit 1\n")
    screen.until("current namespace: no route to host; what is shown is of ")
    screen.press("bq")
    assert screen.ended() == 0
    assert termios.tcgetattr(screen.terminal) == screen.before, "the terminal is as it was"


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_the_screen_has_colours_but_not_with_no_color(
    screens: Any, environment: dict[str, str]
) -> None:
    shown = screens("top", "gpt", **environment).until("q quit", raw=True)
    assert ("\x1b[32m" in shown) == ("NO_COLOR" not in environment)
    assert "\x1b[1m" in shown, "headings are bold"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_the_terminal_as_it_was(screens: Any, number: int, status: int) -> None:
    screen = screens("top")
    screen.until("q quit")
    screen.program.send_signal(number)
    assert screen.ended() == status
    assert termios.tcgetattr(screen.terminal) == screen.before
    os.set_blocking(screen.master, False)
    assert "\x1b[?1049l" in os.read(screen.master, 65536).decode(), "the screen before it is back"


def test_a_plain_terminal_gets_one_answer_of_its_width(screens: Any) -> None:
    screen = screens("top", "gpt", TERM="dumb")
    assert screen.ended() == 0
    shown = os.read(screen.master, 65536).decode()
    assert "\x1b" not in shown and "team/gpt  Running" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_without_rich_it_says_what_to_install(
    kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["top"]) == 2
    assert capsys.readouterr().err == (
        "pipemorph top: a live view needs rich: pip install 'pipemorph[top]'; --once prints without"
        " it\n"
    )
