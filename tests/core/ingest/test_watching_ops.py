"""Ops of iterations at the ingest: asked for while somebody watches, kept within bounds."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from ingest_client import TOKEN, controller
from watch_site import (
    Site,
    ops_of,
    serve,
)

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.ingest.watch import desk as watching
from pipemorph.ingest.watch import worker as watch_worker
from pipemorph.wire import MAX_OPS_BYTES
from pipemorph.wire.ops import most_ops_bytes

pytestmark = pytest.mark.usefixtures("at_once")


def test_ops_are_asked_for_while_somebody_watches_and_not_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(site: Site) -> None:
        assert (await site.report(0, iteration=1)).ops is None
        assert await site.ops(ops_of(0)) == 409, "nobody watches"
        found = await site.view()
        assert found.measured is None and "have been asked for" in found.no_alternative
        wanted = (await site.report(1, iteration=2)).ops
        assert wanted is not None and (wanted.column, wanted.seconds) == (0, watching.LEASE_SECONDS)
        monkeypatch.setattr(watch_worker, "UNHEARD_SECONDS", 0.0)
        assert "this trainer sends no ops" in (await site.view()).no_alternative
        assert await site.ops(ops_of(1)) == 200
        found = await site.view()
        assert found.available == [1] and found.measured is not None
        assert found.measured.iteration == 1 and found.measured.seconds == 0.5
        assert [row.kinds.count("F") for row in found.measured.rows] == [8] * 4
        monkeypatch.setattr(watching, "WATCHED_SECONDS", 0.0)
        assert (await site.report(2, iteration=3)).ops is None
        assert await site.ops(ops_of(2)) == 409

    serve(look)


def test_earlier_iterations_are_there_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(*range(9), iteration=9)
        await site.view()
        assert await site.ops(ops_of(2)) == 200
        kept = site.kept
        one = kept.ops_bytes
        monkeypatch.setattr(watch_worker, "MOST_KEPT_BYTES", 3 * one + one // 2)
        for i in range(3, 9):
            assert await site.ops(ops_of(i)) == 200
        assert (await site.view()).available == [6, 7, 8]
        found = await site.view("view?iteration=7")
        assert found.measured is not None and found.measured.iteration == 7
        entries = watch_worker.ENTRY_BYTES * len(kept.ops)
        assert kept.ops_bytes == sum(map(len, kept.ops.values())) + entries <= 3.5 * one
        monkeypatch.setattr(watch_worker, "MOST_KEPT_OPS", 2)
        assert await site.ops(ops_of(9)) == 200
        assert (await site.view()).available == [8, 9]
        assert kept.ops_bytes == sum(map(len, kept.ops.values())) + 2 * watch_worker.ENTRY_BYTES

    serve(look)


def test_ops_of_all_jobs_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        desk = site.server._watch.desk  # type: ignore[union-attr]
        await site.report(*range(9), iteration=9)
        await site.view()
        assert await site.ops(ops_of(1)) == 200
        one = site.kept.ops_bytes
        site.store.add("default", "other", controller())
        assert (await desk.tell("default", "other", {}, page=False)).status == 200
        mine, other = (each.kept for each in site.pages.viewing._jobs.values())
        for i in range(4):
            other.take_ops(ops_of(i), b"x" * (one - watch_worker.ENTRY_BYTES))
        monkeypatch.setattr(watch_worker, "MOST_KEPT_IN_ALL", 4 * one + one // 2)
        assert await site.ops(ops_of(2)) == 200
        # Those who have most lose their oldest.
        assert [i for _, i in mine.ops] == [1, 2] and [i for _, i in other.ops] == [2, 3]

    serve(look)


def test_ops_go_soon_after_the_last_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        assert await site.ops(ops_of(0)) == 200
        desk = site.server._watch.desk  # type: ignore[union-attr]
        desk.sweep()
        assert site.kept.ops
        monkeypatch.setattr(watching, "OPS_SECONDS", 0.0)
        desk.sweep()
        assert not site.kept.ops and not site.kept.ops_bytes
        assert site.kept.samples, "who looks again in some minutes has not missed much"

    serve(look)


def test_iterations_that_run_again_are_told_anew_with_all_after_them() -> None:
    async def look(site: Site) -> None:
        await site.report(*range(6), iteration=6)
        await site.view()
        for i in range(2, 9):  # Of the last three no report has told yet.
            assert await site.ops(ops_of(i)) == 200
        await site.report(6, iteration=7)
        assert (await site.view()).available == [*range(2, 9)]
        await site.report(4, iteration=5)
        assert (await site.view()).available == [2, 3]
        # Ops may come before the report that tells of it.
        assert await site.ops(ops_of(2)) == 200
        assert (await site.view()).available == [2]

    serve(look)


def test_ops_of_what_ran_before_are_dropped() -> None:
    """Of another attempt, another mesh, or other replicas."""

    async def look(site: Site) -> None:
        async def kept() -> bool:
            assert await site.ops(ops_of(1).model_copy(update={"attempt": attempt})) == 200
            await site.report(2, iteration=3, attempt=attempt)
            return bool(site.kept.ops)

        attempt = 0
        await site.report(0, iteration=1)
        await site.view()
        assert await kept()
        running = site.store.lookup("default", "gpt")
        assert isinstance(running, JobController)
        site.store.left_out = (1,)
        await site.report(2, iteration=3)
        assert not site.kept.ops and await kept()
        attempt = 1
        running.begin_attempt(1)
        await site.report(0, iteration=1, attempt=1)
        assert not site.kept.ops and await kept()
        spec = running.spec.model_dump(by_alias=True)
        spec["parallelism"]["replicas"] = 2
        site.store.remove("default", "gpt")
        site.store.add("default", "gpt", running.resized(JobSpec.model_validate(spec)))
        found = await site.view()
        assert found.available == [] and len(found.columns) == 2
        # Ranks are numbered anew.
        assert await site.ops(ops_of(1).model_copy(update={"attempt": 1})) == 422

    serve(look)


def test_another_job_of_the_same_name_is_shown_anew() -> None:
    async def look(site: Site) -> None:
        await site.report(*range(5), iteration=5)
        before = await site.view()
        assert await site.ops(ops_of(3)) == 200
        site.store.remove("default", "gpt")
        site.store.add("default", "gpt", controller())
        site.store.uid = "uid-2"
        site.sequence = 0
        assert (await site.report(0, iteration=1)).ops is None, "nobody has looked at this one"
        assert await site.ops(ops_of(0)) == 409
        found = await site.view(f"view?after={before.number}")
        assert (found.steps.index, found.available, found.done) == ([0], [], 1)
        assert found.number > before.number, "a page knows that it is another document"
        assert await site.ops(ops_of(0)) == 200

    serve(look)


def test_a_job_sends_ops_no_more_often_and_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "OPS_BURST", 2.0)
    monkeypatch.setattr(watching, "OPS_PER_SECOND", 0.001)
    whole = ops_of(1).body()
    most = most_ops_bytes(4, 8)
    assert len(whole) < most < 40_000

    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        assert await site.ops(whole + b" " * most) == 413
        assert await site.ops(whole + b" " * (most - len(whole))) == 200
        read: list[int] = []

        async def body(most: int) -> bytes:
            read.append(most)
            return whole

        desk = site.server._watch.desk  # type: ignore[union-attr]
        assert (await desk.take("default", "gpt", body, packed=False)).status == 429
        assert read == [], "it is refused unread"

    serve(look)


def test_ops_of_few_jobs_are_read_at_once_and_within_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_worker, "OPS_CPU_BURST", 0.0)

    async def too_much(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        assert await site.ops(ops_of(0)) == 429

    serve(too_much)
    monkeypatch.undo()
    monkeypatch.setattr(watching, "MOST_READING", 0)

    async def too_many(site: Site) -> None:
        await site.view()
        assert await site.ops(ops_of(0)) == 429

    serve(too_many)


def test_ops_of_an_iteration_that_the_ranks_cannot_be_in_are_refused() -> None:
    async def look(site: Site) -> None:
        await site.report(*range(5), iteration=5)
        await site.view()
        # Half a second each: 30 s are 60 of them.
        assert await site.ops(ops_of(5 + watch_worker.APART + 60)) == 200
        assert await site.ops(ops_of(6 + watch_worker.APART + 60)) == 422
        assert await site.ops(ops_of(2**40)) == 422
        full = ops_of(5)
        first = full.stages[0]
        many = {name: getattr(first, name)[:1] * 25 for name in
                ("kinds", "microbatches", "gaps", "durations")}  # fmt: skip
        stages = [first.model_copy(update=many), *full.stages[1:]]
        assert await site.ops(full.model_copy(update={"stages": stages})) == 422

    serve(look)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"job": "other"}, 403), ({"attempt": 7}, 403), ({"column": 1}, 422),
        ({"iteration": 9}, 422), ({"stages": ops_of(1).stages[:3]}, 422),
        ({"stages": ops_of(1).stages[::-1]}, 422), ({"stages": ops_of(1).stages[:3] * 2}, 422),
    ],
)  # fmt: skip
def test_ops_that_do_not_fit_the_job_are_refused(changes: dict[str, Any], status: int) -> None:
    async def look(site: Site) -> None:
        await site.view()
        assert await site.ops(ops_of(1).model_copy(update=changes)) == status
        assert (await site.view()).measured is None

    serve(look)


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 422), (b"{}", 422), (b"\xff" * 99, 422), (b"[" * 5000, 422),
     (b" " * (MAX_OPS_BYTES + 1), 413)],
)  # fmt: skip
def test_what_are_no_ops_are_refused(content: bytes, status: int) -> None:
    """However well they are compressed."""

    async def look(site: Site) -> None:
        await site.view()
        assert await site.ops(content) == status
        assert await site.ops(ops_of(1), token="viewer") == 401
        lame = ops_of(1)
        short = lame.stages[0].model_copy(update={"durations": [1]})
        assert await site.ops(lame.model_copy(update={"stages": [short, *lame.stages[1:]]})) == 422
        assert (await site.view()).measured is None

    serve(look)


def test_the_column_that_is_looked_at_is_asked_for() -> None:
    async def look(site: Site) -> None:
        await site.view("view?column=0")
        asked = (await site.report(0, iteration=1)).ops
        assert asked is not None and asked.column == 0
        await site.view("view?column=7")
        asked = (await site.report(1, iteration=2)).ops
        assert asked is not None and asked.column == 0, "there is no such column"

    serve(look)


def test_a_compressed_report_is_refused_unread() -> None:
    async def look(site: Site) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "deflate"}
        where = f"{site.url}/v1/jobs/default/gpt/reports"
        async with site.session.post(where, data=zlib.compress(b"{}"), headers=headers) as answer:
            assert answer.status == 415

    serve(look)


@pytest.mark.parametrize(
    ("packed", "status"),
    [(b"no zlib at all", 400), (zlib.compress(b" " * (MAX_OPS_BYTES + 1)), 413)],
)
def test_ops_are_unpacked_no_further_than_they_may_be(packed: bytes, status: int) -> None:
    async def look(site: Site) -> None:
        await site.view()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "deflate"}
        where = f"{site.url}/v1/jobs/default/gpt/ops"
        async with site.session.post(where, data=packed, headers=headers) as answer:
            assert answer.status == status

    serve(look)
