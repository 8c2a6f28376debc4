"""Spans of the jobs that an ingest tracks: no cluster."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from operator_status import Shared, known

from pipemorph import spans
from pipemorph.ingest import GenerationDesk
from pipemorph.wire import LinkHealthReport
from pipemorph_operator.ingest.store import ClusterStore

KEY = ("team", "gpt")
PODS = 4


def an_ingest(api: Shared) -> ClusterStore:
    api.job["spec"]["failurePolicy"] = {"maxRestarts": 5}
    cluster: Any = api
    store = ClusterStore(cluster)
    asyncio.run(known(store, api.job))
    return store


def progress(store: ClusterStore, sequence: int, index: int) -> None:
    controller = store.lookup(*KEY)
    assert controller is not None
    values = {
        "protocol": 4, "job": "gpt", "namespace": "team", "attempt": 0, "sequence": sequence,
        "sent_at": 1.0, "state": "training", "iteration": index, "observed_plan_version": 0,
        "applied_plan_version": 0,
        "iterations": [
            {"index": index, "seconds": 0.1, "plan_version": 0, "loss": None,
             "bubble_fraction": 0.1},
        ],
    }  # fmt: skip
    controller.report(LinkHealthReport.model_validate(values), 1000.0)


async def lose(store: ClusterStore) -> None:
    desk = GenerationDesk(store)
    for pod in range(PODS):
        word: dict[str, Any] = {"attempt": 0, "generation": 0, "pod": pod, "event": "gone"}
        if pod == 1:
            word["loss"] = {"reason": "rank 1 was killed by SIGKILL", "at": 1.0, "rank": 1}
        await desk.tell(*KEY, json.dumps(word).encode(), "0")


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_recovery_is_told_once_also_after_a_restart_of_the_ingest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", lambda: provider.get_tracer("test"))
    api = Shared()
    store = an_ingest(api)
    progress(store, 1, 0)

    async def recover() -> None:
        await store.look(KEY)
        await lose(store)
        await store.look(KEY)
        assert exporter.get_finished_spans() == (), "the ranks have not finished an iteration"
        resumed: dict[str, Any] = {"attempt": 0, "generation": 1, "pod": 0, "event": "resumed"}
        resumed |= {"resumed": {"iteration": 1, "rung": "kept"}}
        await GenerationDesk(store).tell(*KEY, json.dumps(resumed).encode(), "0")
        progress(store, 2, 1)
        for _ in range(2):
            store.jobs()[0].looked_at = float("-inf")
            await store.look(KEY)
        await store.persist_generations(*KEY)

    asyncio.run(recover())
    (span,) = exporter.get_finished_spans()
    record = store.jobs()[0].generations.saved.last[-1]
    assert span.name == "pipemorph recovery"
    assert seconds(span) == pytest.approx(record.seconds, abs=1e-3)
    found = dict(span.attributes or {})
    assert found["pipemorph.reason"] == record.cause
    assert (found["pipemorph.rank"], found["pipemorph.pod"]) == (1, 1)
    assert (found["pipemorph.generation"], found["pipemorph.went_on_with"]) == (1, 1)
    assert found["pipemorph.state"] == "kept"

    other = an_ingest(api)
    progress(other, 3, 2)
    asyncio.run(other.look(KEY))
    assert exporter.get_finished_spans() == (span,)
    store.changed(KEY, None)
    root = exporter.get_finished_spans()[-1]
    assert root.name == "pipemorph job team/gpt"
    assert span.parent is not None and span.parent.span_id == root.context.span_id
