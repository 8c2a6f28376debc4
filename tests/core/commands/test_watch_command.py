"""``pipemorph watch`` and ``timeline`` over a played kubectl."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import SLOW, adapted, cluster_job, running
from watched_jobs import watched

from pipemorph.cli import main
from pipemorph.commands.cluster import page_forward, timeline
from pipemorph.spec.status_recoveries import Recoveries
from pipemorph.views.live_page.page_builder import StageTrace, build_page_document

TOKEN = "t0k-en_of_the_page-1234567890"
FORBIDDEN = (
    'Error from server (Forbidden): secrets "gpt-x-0-page" is forbidden: User "jane" cannot get'
    ' resource "secrets" in API group "" in the namespace "team"'
)
NO_FORWARD = (
    'Error from server (Forbidden): pods "gpt-x-0-0" is forbidden: User "jane" cannot create'
    ' resource "pods/portforward" in API group "" in the namespace "team"'
)

KUBECTL = """#!/usr/bin/python3
import json, pathlib, sys
folder, words = pathlib.Path({folder!r}), sys.argv[1:]
with (folder / "calls").open("a") as file:
    print(*words, file=file)
name = words[1].partition(".")[0] if words[0] == "get" else words[0]
said = json.loads((folder / name).read_text())
if "error" in said:
    sys.exit(said["error"])
if words[0] == "get":
    print(json.dumps(said))
    sys.exit()
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        answers = json.loads((folder / "answers").read_text())
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        (folder / "answers").write_text(json.dumps(answers))
        with (folder / "requests").open("a") as file:
            print(self.path, file=file)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass

with HTTPServer(("127.0.0.1", 0), Handler) as server:
    print(f"Forwarding from 127.0.0.1:{{server.server_port}} -> 9450", flush=True)
    if "requests" in said:
        for _ in range(said["requests"]):
            server.handle_request()
    else:
        server.serve_forever()
"""


def pod(index: int = 0, *, page: bool = True, **fields: Any) -> dict[str, Any]:
    env = [{"name": "PIPEMORPH_PAGE_PORT", "value": "9450"}]
    volume = {"name": "pipemorph-page", "secret": {"secretName": "gpt-x-0-page"}}
    return {
        "metadata": {"name": f"gpt-x-0-{index}", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "containers": [{"name": "side"}, {"name": "trainer", "env": env if page else []}],
            "volumes": [{"name": "other"}, *([volume] if page else [])],
            **fields,
        },
        "status": {"phase": "Running"},
    }


class Kubectl:
    """A kubectl whose answers a test sets, and whose port-forward answers for the pod."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "kubectl"
        program.write_text(KUBECTL.format(folder=str(folder)))
        program.chmod(0o755)
        self.says(pipemorphjobs=cluster_job("gpt", running(adapted(), SLOW)))
        self.says(pods={"items": [pod()]})
        self.says(secrets={"data": {"token": base64.b64encode(TOKEN.encode()).decode()}})
        self.says(**{"port-forward": {}})
        self.answers((200, "{}"))

    def says(self, **what: Any) -> None:
        for name, content in what.items():
            (self.folder / name).write_text(json.dumps(content))

    def answers(self, *answers: tuple[int, str]) -> None:
        self.says(answers=answers)

    def lines(self, name: str) -> list[str]:
        found = self.folder / name
        return found.read_text().splitlines() if found.exists() else []


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(page_forward, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(timeline, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return Kubectl(tmp_path)


def test_the_page_is_in_the_pod_of_rank_0(kubectl: Kubectl) -> None:
    older = pod(9) | {"metadata": {"name": "old", "creationTimestamp": "2025-01-01T00:00:00Z"}}
    ended = pod(8) | {"status": {"phase": "Failed"}}
    kubectl.says(pods={"items": [ended, older, pod()]})
    page = page_forward.find_page_pod("team/gpt", None, "prod")
    assert page == page_forward.PagePod(
        "team/gpt", "team", "gpt-x-0-0", 9450, "gpt-x-0-page", host_network=False
    )
    calls = kubectl.lines("calls")
    assert calls[0].startswith("get pipemorphjobs.pipemorph.io gpt --namespace team")
    assert "job-name=gpt,batch.kubernetes.io/job-completion-index=0 " in calls[1]
    assert all(each.endswith("--context prod") for each in calls)


@pytest.mark.parametrize(
    ("recoveries", "index"),
    [(Recoveries(excluded_replicas=[0]), 4), (Recoveries(places=[6, 1, 2, 3, 4, 5, 0, 7]), 6)],
)
def test_rank_0_may_have_another_pod(kubectl: Kubectl, recoveries: Recoveries, index: int) -> None:
    status = running(adapted(), SLOW, recoveries=recoveries)
    parallelism = {"replicas": 2, "minReplicas": 1, "order": ["dp_replicate", "pp"]}
    kubectl.says(pipemorphjobs=cluster_job("gpt", status, **parallelism))
    page_forward.find_page_pod("gpt", "team", None)
    assert f"job-completion-index={index} " in kubectl.lines("calls")[1]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"pods": {"items": []}}, "has no running pod with rank 0: it waits, starts or has ended"),
        ({"pods": {"items": [pod(page=False)]}}, "serve no live page: their command does not call"),
        ({"secrets": {"error": FORBIDDEN}}, 'cannot get resource "secrets"'),
        ({"secrets": {"data": {}}}, "Secret gpt-x-0-page has no token of a page"),
        ({"port-forward": {"error": NO_FORWARD}}, 'cannot create resource "pods/portforward"'),
        ({"answers": [(401, "")]}, "the pod refuses the token of Secret gpt-x-0-page"),
        ({"answers": [(503, "")]}, "pod gpt-x-0-0 serves no page at port 9450 (HTTP 503)"),
    ],
)
@pytest.mark.parametrize("command", [["watch", "gpt"], ["timeline", "gpt", "--out", "x"]])
def test_obstacles_are_one_line(
    kubectl: Kubectl,
    capsys: pytest.CaptureFixture[str],
    says: dict[str, Any],
    words: str,
    command: list[str],
) -> None:
    kubectl.says(**says)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith(f"pipemorph {command[0]}: ")
    assert TOKEN not in said


@pytest.mark.parametrize("host_network", [False, True])
def test_watch_prints_the_url_until_it_is_stopped(kubectl: Kubectl, host_network: bool) -> None:
    kubectl.says(pods={"items": [pod(hostNetwork=host_network)]})
    command = [sys.executable, "-m", "pipemorph.cli", "watch", "team/gpt"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        line = program.stdout.readline()
        assert line.startswith("watch: http://127.0.0.1:") and line.endswith(f"/{TOKEN}/\n")
        if host_network:
            assert "pod gpt-x-0-0 is on its node's network: port 9450" in program.stdout.readline()
        program.send_signal(signal.SIGINT)
        assert program.stdout.read() == ""
        assert program.wait(30) == 0
    forwarded = kubectl.lines("calls")[-1]
    assert forwarded == ("port-forward --address 127.0.0.1 --namespace team pod/gpt-x-0-0 :9450")


def test_watch_ends_with_the_pod(kubectl: Kubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.says(**{"port-forward": {"requests": 1}})
    assert main(["watch", "gpt"]) == 2
    assert "the connection to pod gpt-x-0-0 has ended" in capsys.readouterr().err


# --- timeline --------------------------------------------------------------------------------


def views(*iterations: int) -> list[tuple[int, str]]:
    known, traces = watched(4, 12)
    made = []
    for number, iteration in enumerate(iterations, 1):
        moved = [StageTrace(**{**vars(each), "iteration": iteration}) for each in traces]
        known = replace(known, available=[iteration])
        made.append(build_page_document(known, moved, column=0, number=number).model_dump_json())
    last = build_page_document(known, [], column=0, number=99, live=False).model_dump_json()
    return [*((200, each) for each in made), (200, last)]


def test_a_timeline_has_the_iterations_that_were_seen(
    kubectl: Kubectl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(timeline, "EVERY_SECONDS", 0.01)
    first, *others = views(5, 9)
    kubectl.answers((503, ""), first, (200, "null"), (429, ""), *others)
    out = tmp_path / "trace.json"
    assert main(["timeline", "team/gpt", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"timeline: {out}: 2 iterations\n"
    ops = [each for each in json.loads(out.read_text())["traceEvents"] if each["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in ops} == {(0, stage) for stage in range(4)}
    requests = kubectl.lines("requests")
    assert requests[0] == f"/{TOKEN}/view" and requests[2] == f"/{TOKEN}/view?after=1"


def test_a_timeline_of_a_column_that_is_not_there(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.answers(*views(5))
    assert main(["timeline", "gpt", "--column", "3", "--out", os.devnull]) == 2
    assert "--column: is 3; the job has 1" in capsys.readouterr().err


def test_a_page_of_another_release_is_reported(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.answers((200, '{"version": 9}'))
    assert main(["timeline", "gpt", "--out", os.devnull]) == 2
    assert "its page is of another release than this command" in capsys.readouterr().err
