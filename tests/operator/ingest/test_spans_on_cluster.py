"""Spans of the jobs that an ingest tracks: no cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from operator_status import KEY, Shared, known, tell
from test_recoveries_on_cluster import lose, progress

from pipemorph import spans
from pipemorph.ingest import GenerationDesk
from pipemorph_operator.ingest.store import ClusterStore


def an_ingest(api: Shared) -> ClusterStore:
    api.job["spec"]["failurePolicy"] = {"maxRestarts": 5}
    cluster: Any = api
    store = ClusterStore(cluster)
    asyncio.run(known(store, api.job))
    return store


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
    progress(store, 0)

    async def recover() -> None:
        await store.look(KEY)
        await lose(store, 0)
        await store.look(KEY)
        assert exporter.get_finished_spans() == (), "the ranks have not finished an iteration"
        resumed = {"iteration": 1, "rung": "kept"}
        await tell(GenerationDesk(store), 0, generation=1, event="resumed", resumed=resumed)
        progress(store, 1)
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
    progress(other, 2)
    asyncio.run(other.look(KEY))
    assert exporter.get_finished_spans() == (span,)
    store.changed(KEY, None)
    root = exporter.get_finished_spans()[-1]
    assert root.name == "pipemorph job team/gpt"
    assert span.parent is not None and span.parent.span_id == root.context.span_id
