"""An operator that is there before its kind serves that kind later."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
GROUP, VERSION = "pipemorph.io", "v1alpha1"
JOBS = f"/apis/{GROUP}/{VERSION}/pipemorphjobs"
DEADLINE = 60.0


def resource(name: str, kind: str) -> dict[str, Any]:
    verbs = ["get", "list", "watch", "patch", "create", "delete"]
    return {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}


class Api:
    """API server with no objects, which lists the operator's kind when the test lets it."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.established = False
        self.forbidden: set[str] = set()
        """Namespaces of which everything is refused."""
        self.changed = threading.Condition()

    def answer(self, path: str) -> Any:
        """The body for a GET of ``path``; None for 404."""
        kinds = {f"/apis/{GROUP}/{VERSION}": [resource("pipemorphjobs", "PipeMorphJob")]}
        if not self.established:
            kinds.clear()
        kinds |= {
            "/api/v1": [resource("namespaces", "Namespace")],
            "/apis/batch/v1": [resource("jobs", "Job")],
        }
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            found = [kind.split("/")[2:] for kind in kinds if kind.count("/") == 3]
            return {"groups": [_group(*names) for names in found]}
        if path in kinds:
            return {"resources": kinds[path]}
        if re.sub("/namespaces/[^/]*", "", path).rpartition("/")[0] in kinds:
            return {"metadata": {"resourceVersion": "1"}, "items": []}
        return None

    def wait_for(self, what: str, done: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(done, DEADLINE), f"{what}: it sent {self.requests[-20:]}"


def _group(name: str, version: str) -> dict[str, Any]:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


@pytest.fixture
def api() -> Iterator[tuple[Api, str]]:
    """The API server and its address."""
    played = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            with played.changed:
                played.requests.append(self.path)
                found = played.answer(path)
                played.changed.notify_all()
            refused = any(f"/namespaces/{name}/" in path for name in played.forbidden)
            if "watch=true" in query and not refused:
                time.sleep(0.2)  # Nothing changes.
                found = found and ""
            body = b"" if found == "" else json.dumps(found or {"code": 404}).encode()
            self.send_response(403 if refused else 404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            with suppress(ConnectionError):  # It may have a request to end.
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quietly."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield played, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def operator(folder: Path, server: str, *options: str) -> Iterator[Path]:
    """The process, and its log. Its own port does not matter here, so any will do."""
    kubeconfig = folder / "kubeconfig"
    context = {"name": "a", "context": {"cluster": "a", "user": "a"}}
    kubeconfig.write_text(
        json.dumps(
            {
                "clusters": [{"name": "a", "cluster": {"server": server}}],
                "users": [{"name": "a", "user": {"token": "t"}}],
                "contexts": [context],
                "current-context": "a",
            }
        )
    )
    command = ["-m", "pipemorph_operator", "--ingest-url=https://i", "--host=127.0.0.1"]
    command += ["--lease=system/operator", *options]
    path = os.pathsep.join(str(ROOT / part) for part in ("operator", "trainer", "."))
    log = folder / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, *command, "--metrics-port=0"],
            env=os.environ | {"KUBECONFIG": str(kubeconfig), "PYTHONPATH": path},
            stdout=out,
            stderr=out,
        ) as process,
    ):
        try:
            yield log
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE)
            finally:
                process.kill()
    assert process.returncode == 0, log.read_text()


def test_a_kind_that_is_listed_late_is_served(api: tuple[Api, str], tmp_path: Path) -> None:
    played, server = api
    with operator(tmp_path, server) as log:
        played.wait_for("it looks more than once", lambda: played.requests.count("/apis") >= 2)
        assert not any(path.startswith(JOBS) for path in played.requests)
        with played.changed:
            played.established = True
        played.wait_for(
            "it watches jobs",
            lambda: any(path.startswith(JOBS) and "watch=true" in path for path in played.requests),
        )
        assert "does not list pipemorphjobs.pipemorph.io; is its CRD installed?" in log.read_text()


@pytest.mark.full
def test_a_stop_request_ends_it_while_it_waits(api: tuple[Api, str], tmp_path: Path) -> None:
    played, server = api
    with operator(tmp_path, server):
        played.wait_for("it looks", lambda: "/apis" in played.requests)


@pytest.mark.full
def test_a_namespace_that_is_refused_ends_the_watch_of_no_other_one(
    api: tuple[Api, str], tmp_path: Path
) -> None:
    """The Role is gone, and comes back. kopf ends for it; the process does not."""
    played, server = api
    played.established = True

    def watched(namespace: str) -> int:
        where = JOBS.replace("/pipemorphjobs", f"/namespaces/{namespace}/pipemorphjobs")
        return sum(path.startswith(where) and "watch=true" in path for path in played.requests)

    with operator(tmp_path, server, "--namespace=a", "--namespace=b") as log:
        played.wait_for("it watches both", lambda: watched("a") and watched("b"))
        with played.changed:
            played.forbidden.add("b")
        played.wait_for(
            "kopf ends for one",
            lambda: "the watch of PipeMorphJobs of namespace b: 403" in log.read_text(),
        )
        before = watched("a")
        played.wait_for("it watches the other one", lambda: watched("a") > before + 5)
        with played.changed:
            played.forbidden.clear()
            ended = watched("b")
        played.wait_for("it watches both again", lambda: watched("b") > ended + 5)
