"""Spans of a job, as the OpenTelemetry SDK has them."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pipemorph import spans
from pipemorph.control.record.history import AFTER
from pipemorph.local.host import end_spans
from pipemorph.local.processes.supervise import End, Ending
from pipemorph.local.results.report import Recovery
from pipemorph.spans import JobSpans
from pipemorph.wire import AdaptationRecord
from pipemorph.wire.records import LinkRecord

BEGAN, NOW = 1000.0, 2000.0


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def job(exporter: InMemorySpanExporter) -> Iterator[JobSpans]:
    yield made(exporter)


def made(exporter: InMemorySpanExporter, known: int = 0) -> JobSpans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return JobSpans(provider.get_tracer("test"), "lab", "gpt", began=BEGAN, known=known)


def record(version: int, **more: Any) -> AdaptationRecord:
    given: dict[str, Any] = {
        "kind": "adapt", "detected_at": 1500.5, "detected_at_iteration": 11, "detectable_at": 10,
        "reason": "link 0 is late by 60 ms",
        "links": [
            LinkRecord(link=0, health="slow", delay=0.06),
            LinkRecord(link=2, health="unknown", delay=0.0),
        ],
        "warmup_before": [2, 1], "warmup_after": [4, 1], "routes": ["delegated"],
        "predicted_seconds_before": 1.0, "predicted_seconds_after": 0.5, "promised": 0.5,
    }  # fmt: skip
    return AdaptationRecord(plan_version=version, **(given | more))


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_change_of_plan_from_its_decision_until_it_took_effect(
    job: JobSpans, exporter: InMemorySpanExporter
) -> None:
    job.plans([record(1)], 1501.0)
    job.plans([record(1, applied_at_iteration=12, saved_until=12, measured=0.3)], 1502.25)
    assert not exporter.get_finished_spans(), "its figures are not complete"
    last = {"applied_at_iteration": 12, "saved_until": 12 + AFTER - 1, "measured": 0.4}
    for now in (1510.0, 1511.0):
        job.plans([record(1, **last, iteration_seconds_after=0.6)], now)
    (span,) = exporter.get_finished_spans()
    assert span.name == "pipemorph plan change"
    assert times(span) == (1500.5, 1502.25)
    assert dict(span.attributes or {}) == {
        "pipemorph.version": 1,
        "pipemorph.kind": "adapt",
        "pipemorph.reason": "link 0 is late by 60 ms",
        "pipemorph.promised": 0.5,
        "pipemorph.measured": 0.4,
        "pipemorph.links": (0,),
        "pipemorph.detected_at_iteration": 11,
        "pipemorph.applied_at_iteration": 12,
        "pipemorph.iteration_seconds_after": 0.6,
    }
    job.close(NOW)
    (root,) = by_name(exporter)["pipemorph job lab/gpt"]
    assert times(root) == (BEGAN, NOW)
    assert dict(root.attributes or {}) == {"pipemorph.namespace": "lab", "pipemorph.job": "gpt"}
    assert root.status.status_code is StatusCode.UNSET
    assert span.parent is not None and span.parent.span_id == root.context.span_id


def test_a_change_ends_with_the_next_one_or_with_the_job(
    job: JobSpans, exporter: InMemorySpanExporter
) -> None:
    job.plans([record(1), record(2)], 1501.0)
    job.plans([record(1), record(2, applied_at_iteration=14, saved_until=14)], 1503.0)
    (never,) = exporter.get_finished_spans()
    assert (never.attributes or {})["pipemorph.version"] == 1
    assert "pipemorph.applied_at_iteration" not in (never.attributes or {})
    for _ in range(2):
        job.close(NOW, "rank 1 died")
    first, second = by_name(exporter)["pipemorph plan change"]
    assert times(first) == times(second) == (1500.5, 1503.0)
    (root,) = by_name(exporter)["pipemorph job lab/gpt"]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "rank 1 died")
    job.plans([record(3)], NOW)


def test_of_changes_that_another_host_has_told_nothing_is_told(
    exporter: InMemorySpanExporter,
) -> None:
    job = made(exporter, known=2)
    job.plans([record(2, applied_at_iteration=3), record(3)], 1501.0)
    job.close(NOW)
    (span,) = by_name(exporter)["pipemorph plan change"]
    assert (span.attributes or {})["pipemorph.version"] == 3


def test_a_recovery(job: JobSpans, exporter: InMemorySpanExporter) -> None:
    job.recovery(
        "rank 1 died", began=1600.0, ended=1602.5, rank=1, rung="generation", went_on_with=17,
        state=None,
    )  # fmt: skip
    job.recovery("rank 1 died again", began=1700.0, ended=None)
    good, bad = by_name(exporter)["pipemorph recovery"]
    assert times(good) == (1600.0, 1602.5)
    assert dict(good.attributes or {}) == {
        "pipemorph.reason": "rank 1 died", "pipemorph.rank": 1, "pipemorph.rung": "generation",
        "pipemorph.went_on_with": 17,
    }  # fmt: skip
    assert good.status.status_code is StatusCode.UNSET
    assert bad.status.status_code is StatusCode.ERROR


def test_without_an_endpoint_there_are_no_spans() -> None:
    for environ in (
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_TRACES_EXPORTER": "none"},
    ):
        assert spans.tracer(environ) is None
    job = JobSpans(None, "lab", "gpt", began=BEGAN)
    job.plans([record(1)], NOW)
    job.recovery("x", began=BEGAN, ended=None)
    job.close(NOW)


def test_what_is_missing_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING, logger="pipemorph.spans"):
        assert spans.tracer(environ) is None
        assert spans.tracer(environ | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}) is None
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
        assert spans.tracer({}) is None
    first, second = caplog.messages
    assert (
        "OTEL_EXPORTER_OTLP_ENDPOINT is set" in first and "pip install 'pipemorph[otel]'" in first
    )
    assert "'http/json'; expected http/protobuf or grpc" in second


def test_what_an_exporter_cannot_read_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends no job."""

    def refuse() -> None:
        raise ValueError("could not convert string to float: '10s'")

    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(OTLPSpanExporter=refuse))
    with caplog.at_level(logging.WARNING, logger="pipemorph.spans"):
        assert spans.tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}) is None
    (said,) = caplog.messages
    assert "no spans" in said and "'10s'" in said


def test_a_run_ends_the_span_of_its_last_recovery_only(
    job: JobSpans, exporter: InMemorySpanExporter
) -> None:
    """One that another failure overtook was told then."""
    lost = [Ending(End.FAILED, f"rank {rank} died", at=1600.0 + rank) for rank in range(3)]
    open_ones = [Recovery(each, 0, number, "generation", 5) for number, each in enumerate(lost)]
    run: Any = SimpleNamespace(recoveries=open_ones, completed=False, ending=lost[2])
    end_spans(job, run)
    (span,) = by_name(exporter)["pipemorph recovery"]
    assert (span.attributes or {})["pipemorph.reason"] == "rank 2 died"
    assert span.status.status_code is StatusCode.ERROR


def test_the_core_does_not_import_it() -> None:
    code = "import sys, pipemorph.local.host; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
