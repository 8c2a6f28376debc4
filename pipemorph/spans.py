"""OpenTelemetry spans of a job: one for the job, and below it one per change of plan and recovery.

There are none unless the environment names an OTLP endpoint, or the process was started with a
tracer provider (``opentelemetry-instrument``). The extra ``otel`` has what this needs.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipemorph.control.record.history import AFTER
from pipemorph.wire import AdaptationRecord

log = logging.getLogger("pipemorph.spans")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


@dataclass
class _Change:
    """A change of plan whose span is open. ``applied``: when it took effect, wall clock."""

    span: Any
    applied: float | None = None


class JobSpans:
    """The spans of one job. Times are wall clock, seconds since the epoch.

    ``tracer``: an ``opentelemetry.trace.Tracer``; None: do nothing. ``known``: the newest plan
    version of which nothing is to be told.
    """

    def __init__(
        self, tracer: Any, namespace: str, name: str, *, began: float, known: int = 0
    ) -> None:
        self._tracer, self._known = tracer, known
        self._open: dict[int, _Change] = {}
        if tracer is None:
            return
        self._trace = importlib.import_module("opentelemetry.trace")
        whose = {"pipemorph.namespace": namespace, "pipemorph.job": name}
        self._root = tracer.start_span(
            f"pipemorph job {namespace}/{name}", start_time=_ns(began), attributes=whose
        )
        self._below = self._trace.set_span_in_context(self._root)

    @property
    def enabled(self) -> bool:
        """Whether anybody is told."""
        return self._tracer is not None

    def plans(self, records: Iterable[AdaptationRecord], now: float) -> None:
        """Tell of the newest changes of plan, oldest first, as far as they are known ``now``."""
        if self._tracer is None:
            return
        newest = [record for record in records if record.plan_version > self._known]
        applied = max(
            (r.plan_version for r in newest if r.applied_at_iteration is not None), default=0
        )
        for record in newest:
            version = record.plan_version
            if version not in self._open:
                self._open[version] = _Change(self._begin("plan change", record.detected_at))
            change = self._open[version]
            if change.applied is None and record.applied_at_iteration is not None:
                change.applied = now
            self._describe(change, record)
            if _is_complete(record) or version < applied:
                self._end(version, now)

    def recovery(
        self, cause: str, *, began: float, ended: float | None, **details: str | int | None
    ) -> None:
        """Tell of a recovery: from the loss to the end of the first iteration that was finished
        afterwards. ``ended``: None if there was none."""
        if self._tracer is None:
            return
        span = self._begin("recovery", began)
        span.set_attributes(_attributes({"reason": cause, **details}))
        if ended is None:
            span.set_status(self._trace.StatusCode.ERROR, "no iteration was finished afterwards")
        span.end(_ns(time.time() if ended is None else max(began, ended)))

    def close(self, now: float, failed: str = "") -> None:
        """End all spans. ``failed``: why the job did not complete. Idempotent."""
        if self._tracer is None:
            return
        for version in sorted(self._open):
            self._end(version, now)
        if failed:
            self._root.set_status(self._trace.StatusCode.ERROR, failed)
        self._root.end(_ns(now))
        self._tracer = None

    def _begin(self, what: str, at: float) -> Any:
        return self._tracer.start_span(f"pipemorph {what}", context=self._below, start_time=_ns(at))

    @staticmethod
    def _describe(change: _Change, record: AdaptationRecord) -> None:
        found = {
            "version": record.plan_version,
            "kind": record.kind,
            "reason": record.reason,
            "promised": record.promised,
            "measured": record.measured,
            "links": [each.link for each in record.links if each.health == "slow"],
            "detected_at_iteration": record.detected_at_iteration,
            "applied_at_iteration": record.applied_at_iteration,
            "iteration_seconds_before": record.iteration_seconds_before,
            "iteration_seconds_after": record.iteration_seconds_after,
        }
        change.span.set_attributes(_attributes(found))

    def _end(self, version: int, now: float) -> None:
        """End a span when its plan took effect, or ``now`` if it never did."""
        change = self._open.pop(version)
        change.span.end(_ns(now if change.applied is None else change.applied))
        self._known = max(self._known, version)


def job_spans(namespace: str, name: str, *, known: int = 0) -> JobSpans:
    """The spans of a job that begins now, or is served from now on; they go where the environment
    says, if anywhere."""
    return JobSpans(_tracer(), namespace, name, began=time.time(), known=known)


@functools.cache
def _tracer() -> Any:
    """The tracer of this process; None, and a warning if something is missing, without one."""
    return tracer(os.environ)


def tracer(environ: Mapping[str, str]) -> Any:
    """The tracer that ``environ`` asks for; None if it asks for none, or, with a warning, if what
    it takes is not installed."""
    endpoint = next((name for name in ENDPOINTS if environ.get(name)), None)
    try:
        trace = importlib.import_module("opentelemetry.trace")
        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider):
            return provider.get_tracer("pipemorph")
        if endpoint is None or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
            return None
        protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "http/protobuf")
        if protocol not in EXPORTERS:
            expected = " or ".join(EXPORTERS)
            log.warning("no spans: the OTLP protocol is %r; expected %s", protocol, expected)
            return None
        exporter = importlib.import_module(EXPORTERS[protocol]).OTLPSpanExporter()
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        processors = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
    except ImportError as error:
        if endpoint is not None:
            log.warning(
                "no spans: %s is set, and %s; pip install 'pipemorph[otel]'", endpoint, error
            )
        return None
    except Exception as error:  # noqa: BLE001  of a variable that the exporter cannot read
        log.warning("no spans: OTEL_…: %s: %s", type(error).__name__, error)
        return None
    service = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "pipemorph"}
    # It sends what it has when the interpreter ends.
    made = sdk.TracerProvider(resource=resources.Resource.create(service))
    made.add_span_processor(processors.BatchSpanProcessor(exporter))
    return made.get_tracer("pipemorph")


def _is_complete(record: AdaptationRecord) -> bool:
    """Whether its figures stay as they are."""
    first, last = record.applied_at_iteration, record.saved_until
    return first is not None and last is not None and last - first + 1 >= AFTER


def _attributes(found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"pipemorph.{name}": value for name, value in found.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
