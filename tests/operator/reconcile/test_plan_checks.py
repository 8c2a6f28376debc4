"""Plan checks of large jobs that start run elsewhere: no other job waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_api import FakeCluster
from operator_objects import CONFIG, body
from pydantic import ValidationError
from waiting import until_async

from pipemorph.control import first_plan
from pipemorph.control.first_plan import make_initial_schedule
from pipemorph.errors import InputError
from pipemorph.ingest import PlannerLostError
from pipemorph.planning.problem import MAX_CELLS
from pipemorph.spec.job_spec import JobSpec
from pipemorph_operator import names
from pipemorph_operator.crd.rules import RULES
from pipemorph_operator.ingest import pending_jobs
from pipemorph_operator.ingest.job_store import ClusterJobStore
from pipemorph_operator.kube.client import build_path
from pipemorph_operator.reconcile import plan_checks
from pipemorph_operator.reconcile.plan_checks import PlanChecker
from pipemorph_operator.reconcile.reconciler import Reconciler

PATIENCE = 15.0
KEY = ("team", "gpt")
JOB = build_path(names.KIND, *KEY)


def large(**spec: Any) -> dict[str, Any]:
    """A job whose plan is not made at once."""
    return body(stages=64, schedule={"microbatches": 65}, **spec)


class Api(FakeCluster):
    """An API server with one job."""

    @property
    def job(self) -> dict[str, Any]:
        return self.objects[JOB]

    @property
    def kinds(self) -> list[str]:
        """Kinds of what was created."""
        return [each["kind"] for url, each in self.objects.items() if url != JOB]

    @property
    def running(self) -> tuple[str, str]:
        conditions = self.job["status"]["conditions"]
        return next((c["reason"], c["message"]) for c in conditions if c["type"] == "Running")


class Planner:
    """Planner that answers when the test says so, each time what comes next."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.requests: list[JobSpec] = []
        self.go = asyncio.Event()

    async def __call__(self, spec: JobSpec, *, wanted: bool = True) -> Any:
        self.requests.append(spec)
        await self.go.wait()
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer
        return first_plan.make_schedule_for_others(spec) if wanted else None


@pytest.fixture(autouse=True)
def none_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of a large job are made only by the test's planner in this process."""

    def refuse(spec: JobSpec) -> Any:
        assert first_plan.plans_quickly(spec), "a large plan is made in the event loop"
        return make_initial_schedule(spec)

    monkeypatch.setattr(plan_checks, "make_initial_schedule", refuse)


@asynccontextmanager
async def scenario(
    api: Api, planner: Planner
) -> AsyncIterator[tuple[Reconciler, asyncio.Queue[Any]]]:
    """A reconciler, and the keys that were to be looked at again."""
    again: asyncio.Queue[Any] = asyncio.Queue()
    known = PlanChecker(planner, again.put_nowait)
    try:
        yield Reconciler(api, lambda: CONFIG, lambda namespace, uid: [], known), again
    finally:
        await known.close()


async def test_a_suspended_job_needs_no_plan() -> None:
    api, planner = Api(large(suspend=True)), Planner()
    async with scenario(api, planner) as (reconciler, _):
        await reconciler.reconcile(*KEY)
        assert api.running[0] == "SuspendedBySpec"
        assert planner.requests == []


async def test_a_large_job_starts_once_it_is_known_that_there_is_a_plan() -> None:
    api, planner = Api(large()), Planner(None)
    async with scenario(api, planner) as (reconciler, again):
        for _ in range(3):
            await reconciler.reconcile(*KEY)
            await asyncio.sleep(0)
            assert api.running[0] == "Planning"
        assert (api.kinds, len(planner.requests)) == ([], 1)
        planner.go.set()
        assert await again.get() == KEY
        await reconciler.reconcile(*KEY)
        assert "Job" in api.kinds
        assert len(planner.requests) == 1, "it was known already"


async def test_a_large_job_without_a_plan_fails_with_the_reason() -> None:
    api, planner = Api(large()), Planner(InputError("no order fits the limits"))
    planner.go.set()
    async with scenario(api, planner) as (reconciler, again):
        await reconciler.reconcile(*KEY)
        await again.get()
        await reconciler.reconcile(*KEY)
        (failed,) = (c for c in api.job["status"]["conditions"] if c["type"] == "Failed")
        assert (failed["reason"], failed["message"]) == (
            "InvalidSpec",
            "spec.schedule: no order fits the limits",
        )


async def test_a_lost_planner_gets_the_request_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan_checks, "RETRY_SECONDS", 0.0)
    api, planner = Api(large()), Planner(PlannerLostError("the planner exited (-9)"), None)
    planner.go.set()
    async with scenario(api, planner) as (reconciler, again):
        await reconciler.reconcile(*KEY)
        await again.get()
        await reconciler.reconcile(*KEY)
        assert (len(planner.requests), "Job" in api.kinds) == (2, True)
        assert "team/gpt: the plan could not be computed; retrying" in caplog.text


async def test_a_job_that_is_gone_gets_no_plan() -> None:
    api, planner = Api(large()), Planner()
    outside = asyncio.all_tasks()
    async with scenario(api, planner) as (reconciler, _):
        await reconciler.reconcile(*KEY)
        (task,) = asyncio.all_tasks() - outside
        del api.objects[JOB]
        await reconciler.reconcile(*KEY)
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.cancelled()


# --- the ingest -----------------------------------------------------------------------------------


def attempted(**metadata: Any) -> dict[str, Any]:
    job = large()
    job["metadata"] |= metadata
    return job | {"status": {"attempt": 0}}


async def test_the_ingest_takes_reports_of_a_large_job_once_it_has_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_jobs, "PLAN_AGAIN_SECONDS", 0.0)
    cluster: Any = None
    planner = Planner(PlannerLostError("the planner exited (-9)"), None)
    store = ClusterJobStore(cluster, first_plan=planner)
    store.process_change(KEY, attempted())
    store.process_change(KEY, attempted() | {"status": {"attempt": 3}})
    await asyncio.sleep(0)
    assert (store.keys, len(planner.requests)) == ([], 1)
    planner.go.set()
    await until_async(lambda: store.keys == [KEY], "the store holds the job")
    controller = store.find_job(*KEY)
    assert controller.attempt == 3, "it is held as it is when it has a plan"
    assert len(planner.requests) == 2


@pytest.mark.parametrize("gone", ["deleted", "replaced"])
async def test_the_ingest_forgets_a_large_job_that_goes_before_it_has_a_plan(gone: str) -> None:
    cluster: Any = None
    planner = Planner(None, None)
    store = ClusterJobStore(cluster, first_plan=planner)
    store.process_change(KEY, attempted())
    await asyncio.sleep(0)
    store.process_change(KEY, None)
    if gone == "replaced":
        store.process_change(KEY, attempted(uid="another"))
    others = asyncio.all_tasks() - {asyncio.current_task()}
    planner.go.set()
    if gone == "replaced":
        await until_async(lambda: store.keys == [KEY], "the store holds the job")
        expected = store.find_token_requirements(*KEY)
        assert expected is not None and expected.uid == "another"
    else:
        for _ in range(10):
            await asyncio.sleep(0)
        assert store.keys == [], others


# --- what is too large ----------------------------------------------------------------------------


def test_a_job_that_is_too_large_is_refused_by_the_api_server_and_by_the_models() -> None:
    """The largest one that is taken can be planned."""
    job = body(stages=512, schedule={"microbatches": MAX_CELLS // 512})
    assert first_plan.build_initial_problem(JobSpec.model_validate(job["spec"]))
    job["spec"]["schedule"]["microbatches"] += 1
    with pytest.raises(ValidationError, match="at 512 stages at most 2048 can be planned"):
        JobSpec.model_validate(job["spec"])
    assert any(
        rule.expression == f"self.parallelism.stages * self.schedule.microbatches <= {MAX_CELLS}"
        for rule in RULES["spec"]
    )
