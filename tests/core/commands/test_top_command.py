"""``pipemorph top`` over a kubectl that prints jobs, also on a terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_jobs import SLOW, WELL, Kubectl, adapted, cluster_job, healthy, running
from terminal import Terminal

from pipemorph.cli import main, run_kubectl_plugin

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
    ("arguments", "expected"),
    [
        ([], ""),
        (["-n", "team"], "--namespace team "),
        (["-A", "--context", "prod"], "--all-namespaces "),
    ],
)
def test_all_jobs_once(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert main(["top", *arguments]) == 0, "standard output is no terminal"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == ("NAMESPACE" if "-A" in arguments else "NAME")
    assert len(lines) == 3 and "link 2 +60 ms" in lines[1] and "none" in lines[2]
    (call,) = kubectl.calls()
    assert call.startswith(f"get pipemorphjobs.pipemorph.io {expected}--output json")
    assert call.endswith("--context prod") == ("--context" in arguments)


@pytest.mark.parametrize("arguments", [["team/gpt"], ["gpt", "-n", "team"], ["gpt", "--once"]])
def test_one_job_once(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["top", *arguments]) == 0
    heading, row, _, *story = capsys.readouterr().out.splitlines()
    assert heading.startswith("NAMESPACE  NAME") and row.startswith("team       gpt   Running")
    assert story[0].startswith("outcome  team/gpt is Running; 4 stages")
    (call,) = kubectl.calls()
    assert ("--namespace team" in call) == (arguments != ["gpt", "--once"])


def test_kubectl_runs_it_as_a_plugin(
    kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/kubectl-pipemorph", "top", "team/none"])
    assert run_kubectl_plugin() == 2
    assert capsys.readouterr().err == (
        "kubectl pipemorph top: team/none: Error from server (NotFound):"
        ' pipemorphjobs.pipemorph.io "none" not found\n'
    )
    monkeypatch.setattr(
        sys, "argv", ["/somewhere/kubectl-pipemorph", "explain", "gpt", "-n", "team"]
    )
    assert run_kubectl_plugin() == 0
    assert "team/gpt is Running" in capsys.readouterr().out
    assert kubectl.calls()[-1] == (
        "get pipemorphjobs.pipemorph.io gpt --namespace team --output json"
    )


def test_a_job_that_cannot_be_read_hides_no_other(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.has(GPT, ODD)
    assert main(["top"]) == 0
    shown = capsys.readouterr().out
    assert "gpt" in shown and "! team/odd: spec.parallelism.stages: " in shown
    assert main(["top", "odd"]) == 2
    assert "team/odd: spec.parallelism.stages: " in capsys.readouterr().err
    kubectl.has()
    assert main(["top"]) == 0
    assert capsys.readouterr().out == "no PipeMorphJob was found\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["top", "a/b/c"], "a/b/c: is no name of a job; expected [NAMESPACE/]NAME"),
        (
            ["top", "team/gpt", "-n", "other"],
            "--namespace: is other; team/gpt names team; give one",
        ),
        (["top", "-A", "-n", "x"], "--all-namespaces: does not go with"),
        (["top", "--context", "x", "gone"], '"gone" not found'),
    ],
)
def test_errors_are_one_line(
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
        ("no program", "current namespace: kubectl cannot be run: Exec format"),
    ],
)
def test_a_kubectl_that_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str | None,
    words: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if program:
        (tmp_path / "kubectl").write_text(program)
        (tmp_path / "kubectl").chmod(0o755)
    assert main(["top"]) == 2
    assert words in capsys.readouterr().err


def test_a_kubectl_that_does_not_answer(
    kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipemorph.commands.cluster.kubectl.ANSWER_TIMEOUT_SECONDS", 0.2)
    kubectl.becomes("#!/bin/sh\nexec sleep 100\n")
    assert main(["top"]) == 2
    assert (
        "kubectl did not answer within 0.2 s; is the cluster reachable?" in capsys.readouterr().err
    )


def test_a_job_without_status_has_a_row(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.has(cluster_job("gpt", None))
    assert main(["top", "gpt"]) == 0
    shown = capsys.readouterr().out
    assert "team       gpt   -" in shown and "no operator has processed the job yet" in shown


# --- on a terminal ---------------------------------------------------------------------------


@pytest.fixture
def screen(kubectl: Kubectl) -> Iterator[Callable[..., Terminal]]:
    with ExitStack() as stack:

        def open_screen(*arguments: str, **environment: str) -> Terminal:
            command = [sys.executable, "-m", "pipemorph.cli", "top", *arguments]
            return stack.enter_context(Terminal(command, 30, 100, environment))

        yield open_screen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_table_refreshes_until_a_signal(
    kubectl: Kubectl, screen: Callable[..., Terminal], number: int
) -> None:
    terminal = screen("gpt", "--every", "1")
    terminal.until(lambda shown: "iteration 118 of 1,000" in shown, 60.0)
    kubectl.has(cluster_job("gpt", running(adapted(iteration=130, iteration_seconds=0.4), SLOW)))
    shown = terminal.until(lambda shown: "iteration 130 of 1,000" in shown, 60.0)
    assert shown.startswith("pipemorph top  gpt  ") and "iteration 118" not in shown
    kubectl.becomes("#!/bin/sh\necho no route to host >&2\nexit 1\n")
    wanted = "! gpt: no route to host; table as of ", "iteration 130 of 1,000"
    terminal.until(lambda shown: all(text in shown for text in wanted), 60.0)
    terminal.program.send_signal(number)
    assert terminal.ended(30.0) == {signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}[number]


def test_a_table_with_more_jobs_than_lines_is_cut(
    kubectl: Kubectl, screen: Callable[..., Terminal]
) -> None:
    kubectl.has(*(cluster_job(f"job-{i:02}", running(healthy(), WELL)) for i in range(50)))
    shown = screen().until(lambda shown: "job-26" in shown, 60.0)
    assert shown.startswith("pipemorph top  current namespace") and "job-27" not in shown


def test_a_dumb_terminal_gets_the_table_once(screen: Callable[..., Terminal]) -> None:
    terminal = screen("gpt", TERM="dumb")
    assert terminal.ended(60.0) == 0
    assert "outcome  team/gpt is Running" in str(terminal.screen)
