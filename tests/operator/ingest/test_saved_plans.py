"""What is saved of a job for the next ingest, in an object of its own. No cluster."""

from __future__ import annotations

import asyncio
import base64
import copy
import random
from typing import Any

import pytest
from operator_objects import body
from operator_status import KEY, Shared, known, spec_of
from plant_support import settle

from pipemorph.api.plan import MAX_PACKED, SavedPlan
from pipemorph.api.spec import JobSpec
from pipemorph.api.status import ControlState, JobStatus
from pipemorph.control import JobController
from pipemorph.control.plans import HAND_IN_SECONDS
from pipemorph.ingest.plan_versions import AGENT_BLOCK, BLOCK
from pipemorph.wire import LinkHealthReport, PlanMessage
from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused, path
from pipemorph_operator.ingest import coming
from pipemorph_operator.ingest.plans import plan_object, snapshot_codec
from pipemorph_operator.ingest.plans.plan_object import PlanObject, saved_plan
from pipemorph_operator.ingest.plans.restore import restore
from pipemorph_operator.ingest.status.write_schedule import FLOOR_SECONDS
from pipemorph_operator.ingest.store import ClusterStore

ALL = BLOCK + AGENT_BLOCK


def report(controller: JobController, sequence: int, now: float, version: int = 0) -> None:
    values = {
        "protocol": 4, "job": "gpt", "namespace": "team", "attempt": 0, "sequence": sequence,
        "sent_at": 1.0, "state": "training", "iteration": 0, "observed_plan_version": version,
        "applied_plan_version": 0,
    }  # fmt: skip
    controller.report(LinkHealthReport.model_validate(values), now)


def adapted(controller: JobController) -> JobController:
    """With a directive: the ranks have a plan of which nothing is known and which nobody hands
    in."""
    report(controller, 5, 1000.0, version=7)
    report(controller, 6, 1000.0 + HAND_IN_SECONDS, version=7)
    settle(controller, 1000.0)
    assert controller.directive() is not None
    return controller


def saved(controller: JobController) -> tuple[ControlState, SavedPlan]:
    """In status, and in an object of its own."""
    snapshot = controller.snapshot()
    control = ControlState(attempt=snapshot["attempt"], plan_version=snapshot["plan_version"])
    return control, saved_plan("u", snapshot, snapshot_codec.pack(snapshot))


def restored(
    control: ControlState | None, plan: SavedPlan | None, attempt: int = 0
) -> tuple[JobController, str]:
    return restore(spec_of(), control, plan, attempt, lambda _: None)


# --- the snapshot -----------------------------------------------------------------------------


def test_a_large_plan_fits_into_an_object() -> None:
    """Of a 16th of the largest size, with stages all different: an order without a pattern."""
    times = [
        {"forward": 10 + i * 7 % 5, "backwardInput": 11 + i * 3 % 4, "backwardWeight": 6 + i % 3}
        for i in range(128)
    ]
    many = JobSpec.model_validate(
        body(stages=128)["spec"]
        | {"schedule": {"microbatches": 512, "stageTimes": times, "inFlightLimit": 160}}
    )
    controller = JobController(many)
    plan = PlanMessage.of(controller.wanted).model_dump(mode="json")
    packed = snapshot_codec.pack(controller.snapshot() | {"bases": plan})
    assert len(packed) < MAX_PACKED / 16
    assert snapshot_codec.unpack(packed)["bases"] == plan


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_codec, "MAX_PACKED", 1000)
    noise = random.Random(1).randbytes(1000).hex()
    with pytest.raises(snapshot_codec.TooLarge, match="an object holds at most 1000"):
        snapshot_codec.pack({"attempt": 0, "plan_version": 0, "noise": noise})


def test_people_read_what_plan_it_is() -> None:
    controller = adapted(JobController(spec_of()))
    _, plan = saved(controller)
    directive = controller.directive()
    assert plan.plan is not None and directive is not None and directive.record is not None
    assert plan.plan.version == directive.plan_version == plan.plan_version
    assert (plan.plan.stages, plan.plan.microbatches) == (4, directive.plan.microbatches)
    assert plan.plan.dispatch == directive.plan.dispatch
    assert plan.plan.reason == directive.record.reason
    assert saved(JobController(spec_of()))[1].plan is None


# --- what a new ingest makes of it ------------------------------------------------------------


def test_saved_state_comes_back_and_attempts_go_on() -> None:
    controller = adapted(JobController(spec_of()))
    control, plan = saved(controller)
    assert control.plan_version == controller.plan_version > 7
    back, problem = restored(control, plan)
    assert (back.plan_version, back.attempt, problem) == (controller.plan_version, 0, "")
    assert back.wanted == controller.wanted
    later, _ = restored(control, plan, 3)
    assert (later.plan_version, later.attempt) == (controller.plan_version, 3)


def test_an_older_plan_is_gone_on_from_above_the_versions_in_use() -> None:
    """As after a crash between the two writes: if the ranks run a newer one, it is handed in."""
    controller = adapted(JobController(spec_of()))
    control, plan = saved(controller)
    newer = control.model_copy(update={"plan_version": 12, "reserved": 70})
    back, problem = restored(newer, plan)
    assert (back.plan_version, back.wanted, problem) == (70, controller.wanted, "")


@pytest.mark.parametrize("ahead", [{"plan_version": 9}, {"attempt": 1}], ids=["version", "attempt"])
def test_a_plan_ahead_of_status_is_not_believed(ahead: dict[str, int]) -> None:
    control, plan = saved(adapted(JobController(spec_of())))
    back, problem = restored(control, plan.model_copy(update=ahead))
    assert (back.plan_version, back.directive()) == (8, None)
    assert "kept only its version: it is of v" in problem


def test_without_a_plan_its_version_is_kept() -> None:
    back, problem = restored(ControlState(attempt=2, plan_version=9, reserved=70), None, 2)
    assert (back.plan_version, back.attempt, back.directive(), problem) == (70, 2, None, "")


@pytest.mark.parametrize("damage", ["", "!!", "AAAA", base64.b64encode(b"{}").decode()])
def test_a_damaged_plan_still_gives_its_version(damage: str) -> None:
    control, plan = saved(JobController(spec_of()))
    control, damaged = (
        each.model_copy(update={"plan_version": 9} | more)
        for each, more in ((control, {}), (plan, {"snapshot": damage}))
    )
    back, problem = restored(control, damaged)  # type: ignore[arg-type]
    assert back.plan_version == 9
    assert "kept only its version" in problem


# --- an ingest that takes a job over ----------------------------------------------------------


class Api(Shared):
    """Counts reads, and fails when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.fails: list[Exception] = []
        self.on_read = lambda: None
        self.plan_breaks: list[Exception] = []

    async def get(self, url: str) -> dict[str, Any] | None:
        self.reads.append(url.split("/")[-2])
        if self.fails:
            raise self.fails.pop(0)
        found = await super().get(url)
        self.on_read()
        return found

    def put(self, plan: dict[str, Any]) -> dict[str, Any]:
        made = super().put(plan)
        if self.plan_breaks:
            raise self.plan_breaks.pop(0)
        return made


def store_of(api: Api) -> tuple[ClusterStore, JobController]:
    cluster: Any = api
    store = ClusterStore(cluster, clock=lambda: 1000.0, monotonic=lambda: 1000.0)
    asyncio.run(known(store, api.job))
    return store, controller_of(store)


def controller_of(store: ClusterStore) -> JobController:
    found = store.lookup(*KEY)
    assert isinstance(found, JobController)
    return found


def control_of(api: Api) -> dict[str, Any]:
    """In status, beside who wrote it."""
    return {key: value for key, value in api.job["status"]["control"].items() if key != "writer"}


def persisted(api: Api) -> JobController:
    """An ingest has saved a plan."""
    store, controller = store_of(api)
    adapted(controller)
    asyncio.run(store.persist(*KEY, controller.snapshot()))
    api.reads.clear()
    return controller


def test_the_plan_is_in_an_object_of_the_job_and_not_in_status() -> None:
    api = Api()
    store, controller = store_of(api)
    assert api.reads == [], "of a job that never had a plan, none is read"
    adapted(controller)
    asyncio.run(store.persist(*KEY, controller.snapshot()))
    assert control_of(api) == {"attempt": 0, "planVersion": 8, "reserved": 8 + ALL}
    assert api.plan is not None
    assert store._tracked[KEY].unsaved is None, "it keeps the plan, and writes it again and again"
    job = api.job["metadata"]
    assert (api.plan["kind"], api.plan["jobUid"]) == (names.PLAN_KIND, job["uid"])
    assert api.plan["metadata"]["ownerReferences"] == [
        {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": "gpt", "uid": job["uid"],
         "controller": True},
    ]  # fmt: skip
    again, back = store_of(api)
    assert (back.wanted, api.reads) == (controller.wanted, ["pipemorphplans"])
    tracked = again._tracked[KEY]
    assert tracked.unsaved is None and tracked.control is not None


def test_of_a_plan_that_is_too_large_the_versions_are_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_codec, "MAX_PACKED", 100)
    api = Api()
    controller = persisted(api)
    assert "an object holds at most 100; saved only its version" in caplog.text
    assert api.plan is None
    assert api.job["status"]["control"]["planVersion"] == controller.plan_version == 8
    _, back = store_of(api)
    assert back.plan_version == api.job["status"]["control"]["reserved"] == 8 + ALL


def test_status_that_tells_of_a_plan_that_is_not_saved_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Api()
    persisted(api)
    store_of(api)
    assert "not saved" not in caplog.text
    api.plan = None
    _, back = store_of(api)
    assert "team/gpt: plan v8 is not saved; its agent may hand it in" in caplog.text
    assert (back.plan_version, back.directive()) == (8 + ALL, None)


def test_the_plan_of_a_deleted_job_of_the_name_is_not_taken_and_written_over() -> None:
    api = Api()
    persisted(api)
    api.job["metadata"]["uid"] = "another"
    store, controller = store_of(api)
    assert controller.directive() is None
    adapted(controller)
    asyncio.run(store.persist(*KEY, controller.snapshot()))
    assert api.plan is not None and api.plan["jobUid"] == "another"
    assert api.plan["metadata"]["ownerReferences"][0]["uid"] == "another"


def test_a_plan_that_cannot_be_read_is_an_error_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Api()
    persisted(api)
    assert api.plan is not None
    del api.plan["attempt"]
    _, back = store_of(api)
    assert "team/gpt: the saved plan is unusable: attempt" in caplog.text
    assert (back.plan_version, back.directive()) == (8 + ALL, None)


def test_a_job_is_not_taken_before_its_plan_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often that fails; it goes on from the newest that the watch has shown."""
    monkeypatch.setattr(coming, "READ_AGAIN_SECONDS", 0.0)
    api = Api()
    before = persisted(api)
    api.fails = [TimeoutError(), ApiRefused(500, "InternalError", "no")]
    later = copy.deepcopy(api.job)
    later["status"]["attempt"] = 1

    async def run() -> None:
        cluster: Any = api
        store = ClusterStore(cluster)
        store.changed(KEY, copy.deepcopy(api.job))
        assert store.lookup(*KEY) is None and store.may_come(*KEY)
        store.changed(KEY, later)
        await store.arrival(*KEY)
        controller = controller_of(store)
        assert (controller.attempt, controller.plan_version) == (1, 8 + ALL)
        assert [r.plan_version for r in controller.records] == [
            r.plan_version for r in before.records
        ]

    asyncio.run(run())
    assert api.reads == ["pipemorphplans"] * 3
    assert caplog.text.count("its plan could not be read") == 2


def test_a_job_that_goes_while_its_plan_is_read_is_not_taken() -> None:
    api = Api()
    persisted(api)

    async def run() -> None:
        cluster: Any = api
        store = ClusterStore(cluster)
        store.changed(KEY, copy.deepcopy(api.job))
        await asyncio.sleep(0)
        store.changed(KEY, None)
        await asyncio.sleep(0.01)
        assert store.lookup(*KEY) is None

    asyncio.run(run())


def test_a_job_that_was_read_before_its_plan_was_written_is_read_again() -> None:
    api = Api()
    store, controller = store_of(api)
    asyncio.run(store.persist(*KEY, controller.snapshot()))
    early = copy.deepcopy(api.job)
    adapted(controller)
    asyncio.run(store.persist(*KEY, controller.snapshot()))
    api.reads.clear()

    async def run() -> None:
        cluster: Any = api
        late = ClusterStore(cluster)
        await known(late, early)
        assert controller_of(late).wanted == controller.wanted
        assert late._tracked[KEY].control == JobStatus.model_validate(api.job["status"]).control

    asyncio.run(run())
    assert api.reads == ["pipemorphplans", "pipemorphjobs"]


def test_versions_are_reserved_without_writing_a_plan_that_says_nothing() -> None:
    api, now = Api(), 1000.0
    cluster: Any = api

    async def run() -> None:
        nonlocal now
        store = ClusterStore(cluster, clock=lambda: now, monotonic=lambda: now)
        await known(store, api.job)
        report(controller_of(store), 1, now)
        await store.look(KEY)
        assert control_of(api) == {"attempt": 0, "planVersion": 0, "reserved": ALL}
        assert api.plan is None

    asyncio.run(run())


def test_a_plan_that_an_earlier_version_left_in_status_moves_to_an_object() -> None:
    api = Api()
    before = persisted(api)
    assert api.plan is not None
    api.job["status"]["control"]["snapshot"] = api.plan["snapshot"]
    old, api.plan = api.plan, None
    store, controller = store_of(api)
    assert controller.wanted == before.wanted
    asyncio.run(store.persist_generations(*KEY))
    assert set(control_of(api)) == {"attempt", "planVersion", "reserved"}
    moved: dict[str, Any] = api.plan or {}
    assert (moved["planVersion"], moved["snapshot"]) == (8, old["snapshot"])
    # One in an object is newer.
    api.job["status"]["control"]["snapshot"] = snapshot_codec.pack({})
    assert store_of(api)[1].wanted == before.wanted


# --- writes -----------------------------------------------------------------------------------


def test_the_plan_is_written_after_status_and_again_if_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The ingest's job is to try again a directive that was not persisted; what is saved beside is
    written with the next status."""
    api, now = Api(), 1000.0
    cluster: Any = api

    async def run() -> None:
        nonlocal now
        store = ClusterStore(cluster, clock=lambda: now, monotonic=lambda: now)
        await known(store, api.job)
        controller = adapted(controller_of(store))
        created = api.create

        async def refused(obj: dict[str, Any], owner: str) -> Any:
            if obj["kind"] == names.PLAN_KIND:
                raise ApiRefused(403, "Forbidden", "no right to it")
            return await created(obj, owner)

        api.create = refused  # type: ignore[method-assign]
        with pytest.raises(ApiRefused, match="no right to it"):
            await store.persist(*KEY, controller.snapshot())
        assert api.job["status"]["control"]["planVersion"] == 8
        assert store.reserved(*KEY) == 8 + BLOCK, "it may be served"
        api.create = created  # type: ignore[method-assign]
        now += FLOOR_SECONDS
        await store.look(KEY)
        assert api.plan is not None and api.plan["planVersion"] == 8

    asyncio.run(run())


def about(api: Api) -> dict[str, str]:
    return {"namespace": "team", "name": "gpt", "uid": api.job["metadata"]["uid"]}


def version_of(api: Api, version: int, attempt: int = 0) -> SavedPlan:
    snapshot = {"attempt": attempt, "plan_version": version}
    return saved_plan(about(api)["uid"], snapshot, snapshot_codec.pack(snapshot))


def in_object(api: Api) -> int | None:
    return None if api.plan is None else api.plan["planVersion"]


@pytest.mark.parametrize("broken", [False, True], ids=["", "its answers are lost"])
def test_writes_of_a_plan_follow_each_other(broken: bool) -> None:
    api = Api()
    cluster: Any = api
    plan = PlanObject(None)

    async def run() -> None:
        for version in (1, 2, 5):
            if broken:
                api.plan_breaks = [TimeoutError()]
                with pytest.raises(TimeoutError):
                    await plan.write(cluster, about(api), version_of(api, version))
                assert in_object(api) == version
            await plan.write(cluster, about(api), version_of(api, version))
            assert in_object(api) == version

    asyncio.run(run())


def test_a_late_write_of_a_plan_does_not_replace_a_newer_one() -> None:
    """Its ingest hears of the other one from the next write of status."""
    api = Api()
    cluster: Any = api
    late, other = PlanObject(None), PlanObject(None)

    async def run() -> None:
        await other.write(cluster, about(api), version_of(api, 9))
        await late.write(cluster, about(api), version_of(api, 8))
        assert in_object(api) == 9
        await late.write(cluster, about(api), version_of(api, 10))
        assert in_object(api) == 10
        await other.write(cluster, about(api), version_of(api, 11))
        assert in_object(api) == 11
        # Somebody has deleted it.
        api.plan = None
        await late.write(cluster, about(api), version_of(api, 11))
        assert in_object(api) == 11

    asyncio.run(run())


def test_a_plan_that_others_write_all_the_time_is_given_up() -> None:
    api = Api()
    cluster: Any = api
    plan = PlanObject(None)
    rival = version_of(api, 1)

    async def run() -> None:
        await plan.write(cluster, about(api), version_of(api, 1))

        def written() -> None:
            api.put(plan_object._object(about(api), rival, None))

        written()
        api.on_read = written
        with pytest.raises(ApiRefused, match="others write the PipeMorphPlan all the time"):
            await plan.write(cluster, about(api), version_of(api, 2))
        assert len(api.reads) == plan_object.MOST_TRIES

    asyncio.run(run())


def test_who_may_not_write_is_told_so() -> None:
    class Refusing(Api):
        async def replace(self, obj: dict[str, Any], owner: str) -> dict[str, Any]:
            raise ApiRefused(403, "Forbidden", "no")

    api = Refusing()
    cluster: Any = api
    with pytest.raises(ApiRefused, match="403"):
        asyncio.run(PlanObject("1").write(cluster, about(api), version_of(api, 2)))
    assert path(names.PLAN_KIND, *KEY) == (
        "/apis/pipemorph.io/v1alpha1/namespaces/team/pipemorphplans/gpt"
    )
