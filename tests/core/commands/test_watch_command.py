"""``pipemorph watch`` and ``timeline`` over a played kubectl, and what is said without a page."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from watched_jobs import Trace, watched

from pipemorph.cli import main
from pipemorph.commands.cluster import timeline
from pipemorph.commands.cluster.reach import Ingest, Place, Reached, find
from pipemorph.errors import InputError
from pipemorph.watch.access import HEADER, audience, path, through_api_server
from pipemorph.watch.build import watch_view

JOB = {"kind": "PipeMorphJob", "metadata": {"name": "gpt", "namespace": "team"}}
WHERE = "https://pm-ingest.pipemorph-system.svc:8443"


def batch(url: str | None, made: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    env = [{"name": "OTHER", "value": "x"}]
    env += [{"name": "PIPEMORPH_INGEST_URL", "value": url}] if url else []
    pod = {"containers": [{"name": "side"}, {"name": "trainer", "env": env}]}
    return {"metadata": {"creationTimestamp": made}, "spec": {"template": {"spec": pod}}}


KUBECTL = """#!/usr/bin/python3
import json, pathlib, sys
folder, words = pathlib.Path({folder!r}), sys.argv[1:]
with (folder / "asked").open("a") as file:
    print(*words, file=file)
if words[:2] == ["get", "jobs.batch"]:
    print((folder / "batch").read_text())
elif words[0] == "get":
    print((folder / "job").read_text())
elif words[:2] == ["create", "token"]:
    found = json.loads((folder / "token").read_text())
    if "error" in found:
        sys.exit(found["error"])
    print(json.dumps({{"status": found}}))
elif words[0] == "proxy":
    from http.server import BaseHTTPRequestHandler
    from socketserver import UnixStreamServer

    class Server(UnixStreamServer):
        def get_request(self):
            return super().get_request()[0], ("local", 0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answers = json.loads((folder / "answers").read_text())
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            (folder / "answers").write_text(json.dumps(answers))
            with (folder / "requests").open("a") as file:
                print(self.path, self.headers.get({header!r}), file=file)
            content = body.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    socket = next(w.split("=", 1)[1] for w in words if w.startswith("--unix-socket="))
    with Server(socket, Handler) as server:
        print("Starting to serve on", socket, flush=True)
        server.serve_forever()
"""


class Kubectl:
    """A kubectl whose answers a test sets, and whose proxy answers for the API server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "kubectl"
        program.write_text(KUBECTL.format(folder=str(folder), header=HEADER))
        program.chmod(0o755)
        self.says(job=JOB, batch={"items": [batch(WHERE)]})
        self.token()
        self.answers((200, "{}"))

    def says(self, **what: Any) -> None:
        for name, content in what.items():
            (self.folder / name).write_text(json.dumps(content))

    def token(self, text: str = "t1", until: str = "2100-01-01T00:00:00Z") -> None:
        self.says(token={"token": text, "expirationTimestamp": until})

    def answers(self, *answers: tuple[int, str]) -> None:
        self.says(answers=answers)

    def lines(self, name: str) -> list[str]:
        found = self.folder / name
        return found.read_text().splitlines() if found.exists() else []


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Kubectl(tmp_path)


def ask(*queries: dict[str, str], context: str | None = None) -> list[Reached]:
    async def run() -> list[Reached]:
        place = Place("team", "gpt", ("pipemorph-system", "pm-ingest"))
        async with Ingest(place, "pipemorph-viewer", context) as ingest:
            return [await ingest.ask(query, page=False) for query in queries]

    return asyncio.run(run())


def test_the_ingest_is_where_the_ranks_of_the_newest_attempt_report(kubectl: Kubectl) -> None:
    older = batch("https://old.other.svc:443", "2025-01-01T00:00:00Z")
    kubectl.says(batch={"items": [batch(WHERE), older, batch(None, "2027-01-01T00:00:00Z")]})
    assert find("team/gpt", None, None, "prod") == Place(
        "team", "gpt", ("pipemorph-system", "pm-ingest")
    )
    asked = kubectl.lines("asked")
    assert asked[0].startswith("get pipemorphjobs.pipemorph.io gpt --namespace team")
    assert "pipemorph.io/job-name=gpt" in asked[1]
    assert all(each.endswith("--context prod") for each in asked)


def test_it_may_be_named(kubectl: Kubectl) -> None:
    assert find("gpt", None, "sys/pm", None) == Place("team", "gpt", ("sys", "pm"))
    assert len(kubectl.lines("asked")) == 1


@pytest.mark.parametrize(
    ("name", "ingest", "found", "words"),
    [
        ("a/b/c", None, {}, "is no name of a job"),
        ("gpt", "pm", {}, "expected NAMESPACE/SERVICE"),
        ("gpt", "../x/pm", {}, "expected NAMESPACE/SERVICE"),
        ("gpt", None, {"items": []}, "has not started, or has ended"),
        ("gpt", None, {"items": [batch("https://10.0.0.1:8443")]}, "no Service of the cluster"),
    ],
)
def test_what_names_no_ingest_is_said(
    kubectl: Kubectl, name: str, ingest: str | None, found: dict[str, Any], words: str
) -> None:
    kubectl.says(batch=found)
    with pytest.raises(InputError, match=words):
        find(name, None, ingest, None)


def test_requests_go_through_the_api_server_with_a_token_of_the_page_alone(
    kubectl: Kubectl,
) -> None:
    assert [each.status for each in ask({"column": "1"}, {}, context="prod")] == [200, 200]
    token, proxy = sorted(kubectl.lines("asked"))
    assert token.startswith("create token pipemorph-viewer --namespace team --duration 1800s")
    assert f"--audience {audience('team', 'gpt')} " in token and token.endswith("--context prod")
    where = through_api_server("pipemorph-system", "pm-ingest") + path("team", "gpt")
    assert where == (
        "/api/v1/namespaces/pipemorph-system/services/https:pm-ingest:https/proxy"
        "/v1/jobs/team/gpt/watch/"
    )
    assert kubectl.lines("requests") == [f"{where}view?column=1 t1", f"{where}view t1"]
    assert "--accept-paths=^/api/v1/namespaces/pipemorph" in proxy
    assert proxy.endswith("--context prod")


def test_a_token_is_made_anew_before_it_ends_and_when_it_is_refused(kubectl: Kubectl) -> None:
    kubectl.token("old", "2020-01-01T00:00:00Z")
    ask({}, {})
    assert sum("create token" in each for each in kubectl.lines("asked")) == 3
    kubectl.token()
    kubectl.answers((401, json.dumps({"error": "the API server rejected the token"})), (200, "{}"))
    (found,) = ask({})
    assert found.status == 200


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, '{"kind": "Status", "message": "services is forbidden"}'), "watch.groups"),
        ((403, '{"error": "x may not get pipemorphjobs"}'), "bind role view to that account"),
        ((404, "404 page not found"), "an ingest of this release is needed"),
        ((503, '{"kind": "Status", "message": "no endpoints available"}'), "no endpoints"),
        ((404, '{"error": "there is no job team/gpt here that runs"}'), "no job team/gpt here"),
    ],
)
def test_why_there_is_no_page_is_said_before_anything_is_served(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], answer: tuple[int, str], words: str
) -> None:
    kubectl.answers(answer)
    assert main(["watch", "team/gpt"]) == 2
    found = capsys.readouterr()
    assert words in found.err and found.out == ""
    assert found.err.count("\n") == 1


def test_what_to_do_without_the_account_is_said(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    error = 'error: failed to create token: serviceaccounts "pipemorph-viewer" not found'
    kubectl.says(token={"error": error})
    assert main(["watch", "team/gpt"]) == 2
    assert "kubectl create serviceaccount pipemorph-viewer -n team" in capsys.readouterr().err


def test_a_proxy_that_does_not_start_is_said(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    program = kubectl.folder / "kubectl"
    program.write_text(
        program.read_text().replace(
            'print("Starting', 'sys.exit("no such context")\n        print("x'
        )
    )
    assert main(["watch", "team/gpt"]) == 2
    assert "kubectl proxy: no such context" in capsys.readouterr().err


@pytest.mark.parametrize("status", [None, 0, 1])
@pytest.mark.parametrize("error", [aiohttp.ClientError("reset"), OSError("gone"), TimeoutError()])
def test_a_proxy_that_has_ended_ends_the_command_and_an_error_of_one_request_does_not(
    status: int | None, error: Exception
) -> None:
    def get(*_: Any, **__: Any) -> Any:
        raise error

    ingest: Any = Ingest(Place("team", "gpt", ("sys", "pm")), "viewer", None)
    ingest._session = SimpleNamespace(get=get)
    ingest._proxy = SimpleNamespace(returncode=status)
    ingest._token, ingest._until = "t1", float("inf")
    if status is not None:
        with pytest.raises(InputError, match="team/gpt: kubectl proxy has ended; start"):
            asyncio.run(ingest.ask({}, page=True))
        return
    found = asyncio.run(ingest.ask({}, page=True))
    assert (found.status, found.of_ingest) == (504, False)
    assert found.why() == (str(error) or "no answer in time")


def documents(*iterations: int) -> list[tuple[int, str]]:
    """Of a job that is watched, one with each of these iterations."""
    known, traces = watched(4, 12)
    found = []
    for number, i in enumerate(iterations, start=1):
        each = [Trace(t.rank, t.stage, 0, i, 0, t.ops) for t in traces]
        view = watch_view(known, each, column=0, number=number)
        found.append((200, view.model_dump_json()))
    return found


def test_the_iterations_that_were_seen_are_a_trace(
    kubectl: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "EVERY_SECONDS", 0.01)
    busy = 429, json.dumps({"error": "another document would cost too much now"})
    first, *others = documents(3, 3, 5)
    kubectl.answers(first, (200, "null"), busy, *others, (200, "null"))
    out = tmp_path / "trace.json"
    assert main(["timeline", "team/gpt", "--out", str(out), "--seconds", "2"]) == 0
    found = json.loads(out.read_text())
    assert found["otherData"]["iterations"] == [3, 5]
    ops = [each for each in found["traceEvents"] if each["ph"] == "X"]
    known, traces = watched(4, 12)
    assert len(ops) == 2 * sum(len(trace.ops) for trace in traces)
    assert {each["tid"] for each in ops} == {0, 1, 2, 3}
    names = {each["args"]["name"] for each in found["traceEvents"] if each["ph"] == "M" and
             each["name"] == "process_name"}  # fmt: skip
    assert names == {known.job.metadata.name}
    for trace in traces:
        mine = [e for e in ops if e["tid"] == trace.stage and e["args"]["iteration"] == 3]
        assert [e["name"] for e in mine] == [f"{op.kind.value}{op.microbatch}" for op in trace.ops]
        zero = min(op.start for each in traces for op in each.ops)
        for event, op in zip(mine, trace.ops, strict=True):
            assert event["ts"] == pytest.approx(1e6 * (op.start - zero), abs=2)
            assert event["dur"] == pytest.approx(1e6 * (op.end - op.start), abs=2)
    asked = kubectl.lines("requests")
    assert "after=1" in asked[1]


BUSY = {
    502: "bad gateway",
    503: '{"kind": "Status", "message": "no endpoints available"}', 504: "timeout",
}  # fmt: skip


def test_a_trace_goes_on_after_errors_that_pass(
    kubectl: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "EVERY_SECONDS", 0.01)
    first, second = documents(3, 5)
    passing = [(status, BUSY[status]) for status in (502, 503, 504)]
    kubectl.answers(first, *passing, second, (200, "null"))
    out = tmp_path / "trace.json"
    assert main(["timeline", "team/gpt", "--out", str(out), "--seconds", "2"]) == 0
    assert json.loads(out.read_text())["otherData"]["iterations"] == [3, 5]


@pytest.mark.parametrize(
    "last", [(404, '{"error": "there is no job team/gpt here that runs"}'), (200, "{}")]
)
def test_what_was_seen_is_written_whatever_comes_after_that(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    last: tuple[int, str],
) -> None:  # fmt: skip
    monkeypatch.setattr(timeline, "EVERY_SECONDS", 0.01)
    kubectl.answers(*documents(3), last)
    out = kubectl.folder / "trace.json"
    assert main(["timeline", "team/gpt", "--out", str(out), "--seconds", "60"]) == 0
    assert json.loads(out.read_text())["otherData"]["iterations"] == [3]
    said = capsys.readouterr().err
    assert "team/gpt: " in said and "this is the end of the trace" in said


def test_an_error_that_does_not_pass_in_time_is_said(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(timeline, "FIRST_SECONDS", 0.0)
    kubectl.answers((503, BUSY[503]))
    assert main(["timeline", "team/gpt", "--out", "x.json", "--seconds", "0.2"]) == 2
    assert "no endpoints" in capsys.readouterr().err


def test_why_there_is_no_trace_is_said(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "FIRST_SECONDS", 0.0)
    known, _ = watched(4, 12)
    why = "this trainer sends no ops of its iterations"
    view = watch_view(replace(known, no_ops=why), [], column=0)
    kubectl.answers((200, view.model_dump_json()))
    command = ["timeline", "team/gpt", "--out", "x.json", "--seconds"]
    for more, words in (
        (["0.1"], f"no iteration was seen: {why}"),
        (["0.1", "--column", "7"], "--column: is 7; the job has 1"),
        (["0"], "--seconds: is 0"),
    ):
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err
    kubectl.answers((200, "{}"))
    assert main([*command, "0.1"]) == 2
    assert "is of another release than this command" in capsys.readouterr().err
