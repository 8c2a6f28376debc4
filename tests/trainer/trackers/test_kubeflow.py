"""Progress of a TrainJob, posted to a server with TLS that checks as the controller's does."""

from __future__ import annotations

import json
import logging
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from served import certificate
from set_clock import Clock

from pipemorph.errors import PipeMorphError
from pipemorph_trainer.trackers import FinishedIteration
from pipemorph_trainer.trackers.kubeflow import AUTHORITY, TOKEN, URL, TrainJobStatus

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/lab/trainjobs/gpt/status"
MOST_METRICS, MOST_LETTERS = 256, 64


class Controller:
    """The status server of Kubeflow Trainer, as far as a client meets it."""

    def __init__(self, folder: Path) -> None:
        outer = self
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.answer = 200
        self.authority, key = certificate(folder)
        self.token = folder / "token"
        self.token.write_text("first\n")

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert (self.path, self.headers["Content-Type"]) == (PATH, "application/json")
                outer.posts.append((self.headers["Authorization"], json.loads(body)))
                reply = json.dumps({"kind": "Status", "message": "Forbidden"}).encode()
                self.send_response(outer.answer)
                if outer.answer == 307:
                    self.send_header("Location", "https://elsewhere.example/")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.authority, key)
        self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def environ(self) -> dict[str, str]:
        return {
            URL: f"https://127.0.0.1:{self.server.server_port}{PATH}",
            AUTHORITY: str(self.authority),
            TOKEN: str(self.token),
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(60)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.close()


def finished(index: int, total: int | None = 40, **more: Any) -> FinishedIteration:
    given: dict[str, Any] = {"seconds": 0.5, "loss": 2.25, "bubble_fraction": 0.125} | more
    return FinishedIteration(index=index, plan_version=1, total=total, **given)


def reporter(controller: Controller, clock: Clock) -> TrainJobStatus:
    found = TrainJobStatus.from_env(controller.environ)
    found._clock = clock
    return found


def test_progress_remaining_time_and_figures(controller: Controller) -> None:
    reporter(controller, Clock())(finished(9))
    ((authorization, body),) = controller.posts
    assert authorization == "Bearer first"
    assert set(body) == {"trainerStatus"}
    status = body["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (25, 15)
    assert status["metrics"] == [
        {"name": "iteration", "value": "9"},
        {"name": "iteration_seconds", "value": "0.5"},
        {"name": "bubble_fraction", "value": "0.125"},
        {"name": "plan_version", "value": "1"},
        {"name": "loss", "value": "2.25"},
    ]
    at = datetime.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - at).total_seconds()) < 600


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (finished(0, 3, seconds=1.0), (33, 2)),
        (finished(2, 3), (100, 0)),
        (finished(0, 10**9, seconds=1e5, loss=float("nan")), (0, 2**31 - 1)),
        # The manifest was edited, and a recovery repeats some.
        (finished(5, 3, loss=None), (100, 0)),
    ],
)
def test_a_status_keeps_to_the_limits_of_the_field(
    given: FinishedIteration, wanted: tuple[int, int]
) -> None:
    made = TrainJobStatus("https://h/", Path("ca"), Path("token"))
    status = made.make_status(given, datetime.now(UTC))["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == wanted
    assert len(status["metrics"]) <= MOST_METRICS
    for metric in status["metrics"]:
        assert all(1 <= len(metric[part]) <= MOST_LETTERS for part in ("name", "value"))


def test_without_a_job_nothing_is_said_of_progress(controller: Controller) -> None:
    reporter(controller, Clock())(finished(9, None))
    assert set(controller.posts[0][1]["trainerStatus"]) == {"metrics", "lastUpdatedTime"}


def test_every_five_seconds_and_the_last_one_with_a_token_that_changes(
    controller: Controller,
) -> None:
    clock = Clock()
    tell = reporter(controller, clock)
    for index in range(40):
        tell(finished(index))
        clock.now += 0.5
        controller.token.write_text(f"token-{index}\n")
    percents = [body["trainerStatus"]["progressPercentage"] for _, body in controller.posts]
    assert percents == [2, 27, 52, 77, 100]
    assert [who for who, _ in controller.posts[:2]] == ["Bearer first", "Bearer token-9"]


@pytest.mark.parametrize("status", [403, 500, 307])
def test_a_refusal_is_one_line_and_the_next_try_is_a_minute_later(
    controller: Controller, status: int
) -> None:
    clock = Clock()
    tell = reporter(controller, clock)
    controller.answer = status
    with pytest.raises(PipeMorphError, match=rf"answers {status}: .*Forbidden.*expected 200"):
        tell(finished(0))
    controller.answer = 200
    for seconds, posts in ((59, 1), (1, 2)):
        clock.now += seconds
        tell(finished(1))
        assert len(controller.posts) == posts


def test_what_cannot_be_reached_or_read_is_one_line(controller: Controller) -> None:
    environ = controller.environ
    bad = {
        URL: "https://127.0.0.1:1/status",
        AUTHORITY: str(controller.token),
        TOKEN: str(controller.token.with_name("none")),
    }
    for name, value in bad.items():
        tell = TrainJobStatus.from_env(environ | {name: value})
        assert tell is not None
        with pytest.raises(PipeMorphError, match=f"{URL} https://") as raised:
            tell(finished(0))
        assert "\n" not in str(raised.value)
    controller.token.write_text("se\ncret")
    tell = TrainJobStatus.from_env(environ)
    assert tell is not None
    with pytest.raises(PipeMorphError, match="holds no token") as raised:
        tell(finished(0))
    assert "cret" not in str(raised.value)
    assert controller.posts == []


def test_nothing_is_sent_without_all_variables(caplog: pytest.LogCaptureFixture) -> None:
    environ = {URL: "https://h:1/status", AUTHORITY: "ca", TOKEN: "token"}
    assert TrainJobStatus.from_env(environ) is not None
    for name in environ:
        assert TrainJobStatus.from_env({n: v for n, v in environ.items() if n != name}) is None
    for url in ("http://h/status", "https://", "https://h:x/"):
        with caplog.at_level(logging.WARNING, logger="pipemorph.trackers"):
            assert TrainJobStatus.from_env(environ | {URL: url}) is None
        assert f"{URL} is {url!r}; expected https://" in caplog.messages[-1]
