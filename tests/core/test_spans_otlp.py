"""Spans as a collector gets them: by OpenTelemetry's own exporter, over HTTP.

The exporter is no dependency of ours: ``pip install 'pipemorph[otel]'``, as `make soak` does.
Without it nothing here is checked, and the run says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytestmark = pytest.mark.soak

JOB = """
import time
from pipemorph.spans import job_spans
from pipemorph.wire import AdaptationRecord

now = time.time()
job = job_spans("lab", "gpt")
job.plans([AdaptationRecord(
    plan_version=1, kind="adapt", detected_at=now, detected_at_iteration=11, detectable_at=10,
    reason="link 0 is late by 60 ms", links=[], warmup_before=[2, 1], warmup_after=[4, 1],
    routes=["delegated"], predicted_seconds_before=1.0, predicted_seconds_after=0.5, promised=0.5,
    measured=0.4, applied_at_iteration=12, saved_until=60,
)], now + 1)
job.recovery("rank 2 died", began=now, ended=now + 2.5, rank=2)
job.close(now + 3)
"""


class Collector:
    """An OTLP collector, as far as an exporter meets it."""

    def __init__(self) -> None:
        outer = self
        self.bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_what_a_process_tells_until_it_ends_arrives(collector: Collector) -> None:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="the exporter is not installed"
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    where = f"http://127.0.0.1:{collector.server.server_port}"
    done = subprocess.run(
        [sys.executable, "-c", JOB], env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": where},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    spans: dict[str, Any] = {}
    for body in collector.bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            told = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert told["service.name"] == "pipemorph"
            spans |= {each.name: each for scope in resource.scope_spans for each in scope.spans}
    assert set(spans) == {"pipemorph job lab/gpt", "pipemorph plan change", "pipemorph recovery"}
    job, change, recovery = (spans[name] for name in sorted(spans))
    assert change.parent_span_id == recovery.parent_span_id == job.span_id
    assert change.trace_id == recovery.trace_id == job.trace_id
    assert recovery.end_time_unix_nano - recovery.start_time_unix_nano == pytest.approx(2.5e9)
    attributes = {each.key: each.value for each in change.attributes}
    assert attributes["pipemorph.reason"].string_value == "link 0 is late by 60 ms"
    assert attributes["pipemorph.measured"].double_value == 0.4
