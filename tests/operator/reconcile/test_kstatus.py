"""Verdicts of generic tools on a job in each of its states: kstatus, ``kubectl wait``, and Argo
CD's health check in Lua."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kstatus import kstatus, wait_ends
from lupa import lua51
from operator_objects import CONFIG, World, body, failed, job_facts, pod

from pipemorph.spec.job_status import JobStatus
from pipemorph_operator import names
from pipemorph_operator.crd.generate import build_job_definition
from pipemorph_operator.kube.job_object import dump_status
from pipemorph_operator.reconcile.decide import report_internal_error, report_rejected_objects
from pipemorph_operator.reconcile.pending_pods import MISSING_SECONDS

QUEUE = {"gang": {"kueue": {"queue": "q"}}}


def starting() -> World:
    world = World(body())
    world.turn()
    return world


def queued() -> World:
    world = World(body(placement=QUEUE))
    world.turn()
    world.jobs[0] = job_facts(active=0, suspended=True)
    world.turn()
    return world


def unheard(**training: Any) -> World:
    world = World(body(failurePolicy={"maxRestarts": 1}))
    world.turn()
    world.running()
    if training:
        world.body["status"]["training"] = training
        world.turn()
    return world


def running() -> World:
    return unheard(attempt=0, state="training")


def ranks_start() -> World:
    return unheard(attempt=0, state="starting", message="rank 1 is awaited")


def reported_by_an_earlier_attempt() -> World:
    world = restarting()
    world.settle()
    world.running(1)
    return world


def stale() -> World:
    world = running()
    silent = {"type": "LinksHealthy", "status": "Unknown", "reason": "ReportsStale", "message": ""}
    silent["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    world.body["status"]["conditions"].append(silent)
    world.turn()
    return world


def other_authority() -> World:
    """The chart was installed again under another name while it ran."""
    world = running()
    world.config = replace(CONFIG, ca_pem=pem("NEW"))
    world.jobs[0] = replace(
        world.jobs[0], ca_fingerprints=replace(CONFIG, ca_pem=pem("OLD")).ca_fingerprints
    )
    world.turn()
    assert "suspend and resume" in world.message("Running")
    world.turn()
    assert world.events.count("OtherAuthority") == 1
    return world


def rotated_authority() -> World:
    world = running()
    world.config = replace(CONFIG, ca_pem=pem("OLD") + pem("NEW"))
    world.jobs[0] = replace(
        world.jobs[0], ca_fingerprints=replace(CONFIG, ca_pem=pem("OLD")).ca_fingerprints
    )
    world.turn()
    return world


def pem(text: str) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"


def unreadable(world: World) -> World:
    """Status of a release that cannot read what one before it has accepted."""
    world.body["spec"]["schedule"]["policy"] = "of-old"
    world.turn()
    return world


def unreadable_while_running() -> World:
    world = unreadable(running())
    assert 0 in world.jobs and world.status["state"] == "Running" and "Failed" not in world.events
    return world


def unreadable_before_it_starts() -> World:
    return unreadable(without_image())


def unreadable_and_suspended() -> World:
    world = unreadable(running())
    edit(world, suspend=True)
    world.turn()
    world.settle()
    assert world.jobs == {}
    return world


def short_of_a_pod() -> World:
    """Status while a lost pod is replaced."""
    world = running()
    world.jobs[0] = job_facts(ready=1)
    world.turn()
    return world


def ended(**how: Any) -> World:
    world = running()
    world.jobs[0] = job_facts(active=0, **how)
    world.pods = [pod(1, exit_code=3)]
    world.turn()
    return world


def restarting() -> World:
    return ended(failed=failed())


def complete() -> World:
    return ended(succeeded=2, complete=True)


def out_of_restarts() -> World:
    world = restarting()
    world.settle()
    world.running(1)
    world.jobs[1] = job_facts(1, active=0, failed=failed())
    world.turn()
    return world


def invalid() -> World:
    world = World(body())
    world.body["spec"]["schedule"]["inFlightLimit"] = [0, 4]
    world.turn()
    return world


def without_image() -> World:
    world = World(body(), replace(CONFIG, trainer_image=""))
    world.turn()
    return world


def pods_refused() -> World:
    world = starting()
    world.jobs[0] = job_facts(active=0, wanted_pods=2)
    world.no_pod = "exceeded quota"
    world.later(MISSING_SECONDS + 1)
    world.turn()
    return world


def shown(world: World, status: JobStatus | None) -> World:
    world.body["status"] = dump_status(status)
    return world


def object_refused() -> World:
    world = World(body())
    return shown(world, report_rejected_objects(world.observe(), "ObjectRefused", "quota").status)


def api_server_away() -> World:
    world = World(body())
    seen = world.observe()
    return shown(world, report_rejected_objects(seen, "ObjectRefused", "503", passing=True).status)


def fault() -> World:
    world = World(body())
    return shown(world, report_internal_error(world.observe(), ValueError("x")).status)


def fault_while_running() -> World:
    world = running()
    return shown(world, report_internal_error(world.observe(), ValueError("x")).status)


def suspended() -> World:
    world = suspending()
    world.settle()
    return world


def suspending() -> World:
    world = running()
    edit(world, suspend=True)
    world.turn()
    return world


def resumed() -> World:
    world = suspended()
    edit(world, suspend=False)
    world.turn()
    return world


def edit(world: World, **spec: Any) -> None:
    world.body["spec"] |= spec
    world.body["metadata"]["generation"] += 1


STATES = [
    (starting, "InProgress", "Reconciling", "WaitingForPods"),
    (queued, "InProgress", "Reconciling", "WaitingForAdmission"),
    (running, "Current", "Ready", "AllRanksReady"),
    (unheard, "InProgress", "Reconciling", "NoReportsYet"),
    (ranks_start, "InProgress", "Reconciling", "NoReportsYet"),
    (reported_by_an_earlier_attempt, "InProgress", "Reconciling", "NoReportsYet"),
    (other_authority, "Failed", "Stalled", "OtherAuthority"),
    (rotated_authority, "Current", "Ready", "AllRanksReady"),
    (stale, "InProgress", "Reconciling", "ReportsStale"),
    (unreadable_while_running, "Failed", "Stalled", "InvalidSpec"),
    (unreadable_before_it_starts, "Failed", "Stalled", "InvalidSpec"),
    (unreadable_and_suspended, "Current", "", ""),
    (short_of_a_pod, "InProgress", "Reconciling", "WaitingForPods"),
    (restarting, "InProgress", "Reconciling", "Restarting"),
    (suspending, "InProgress", "Reconciling", "RanksStopping"),
    (suspended, "Current", "", ""),
    (resumed, "InProgress", "Reconciling", "WaitingForPods"),
    (complete, "Current", "Ready", "AllRanksFinished"),
    (out_of_restarts, "Failed", "Stalled", "MaxRestartsExceeded"),
    (invalid, "Failed", "Stalled", "InvalidSpec"),
    (without_image, "Failed", "Stalled", "NoTrainerImage"),
    (pods_refused, "Failed", "Stalled", "PodsRefused"),
    (object_refused, "Failed", "Stalled", "ObjectRefused"),
    (api_server_away, "InProgress", "Reconciling", "ObjectRefused"),
    (fault, "Failed", "Stalled", "InternalError"),
    (fault_while_running, "Current", "Ready", "InternalError"),
]


@pytest.mark.parametrize(("state", "read", "true", "reason"), STATES)
def test_each_state(state: Callable[[], World], read: str, true: str, reason: str) -> None:
    """Conditions: at most one of three is True; abnormal ones show only while they hold."""
    world = state()
    assert kstatus(world.body) == read
    assert wait_ends(world.body) is (true == "Ready")
    found = {kind: world.condition(kind) for kind in names.KSTATUS_CONDITIONS}
    expected = dict.fromkeys(names.KSTATUS_CONDITIONS, ("", ""))
    if true:
        no = "Unknown" if reason == "ReportsStale" else "False"
        expected |= {"Ready": (no, reason), true: ("True", reason)}
    assert found == expected
    for each in world.status["conditions"]:
        if each["type"] in names.KSTATUS_CONDITIONS:
            assert each["observedGeneration"] == world.body["metadata"]["generation"]


# --- Argo CD ---------------------------------------------------------------------------------

CONDITIONS = Path(__file__).resolve().parents[3] / "docs" / "reference" / "conditions.md"
ARGO = {"InProgress": "Progressing", "Current": "Healthy", "Failed": "Degraded"}


@pytest.fixture(scope="module")
def check() -> str:
    """The Lua that the documentation has users give to Argo CD, which runs Lua 5.1."""
    blocks = re.findall("```yaml\n(.*?)```", CONDITIONS.read_text(), re.DOTALL)
    (config,) = (text for text in blocks if "resource.customizations.health" in text)
    found: str = yaml.safe_load(config)["resource.customizations.health.pipemorph.io_PipeMorphJob"]
    return found


def lua(value: Any) -> str:
    """A value of JSON as Lua has it, which has no null: such a field is omitted."""
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'[{lua(k)}] = {lua(v)}' for k, v in value.items() if v is not None)}}}"
        )
    if isinstance(value, list):
        return f"{{{', '.join(map(lua, value))}}}"
    if isinstance(value, str):
        return '"' + "".join(f"\\{byte:03d}" for byte in value.encode()) + '"'
    return json.dumps(value)


def health(check: str, obj: dict[str, Any]) -> tuple[str, str]:
    """Status and message."""
    script = f"local function check(obj)\n{check}\nend\nreturn check({lua(obj)})\n"
    found = lua51.LuaRuntime().execute(script)
    return found["status"], found["message"]


@pytest.mark.parametrize(("state", "read", "true", "reason"), STATES)
def test_argo_cd_reads_each_state(
    check: str, state: Callable[[], World], read: str, true: str, reason: str
) -> None:
    world = state()
    messages = {each["type"]: each["message"] for each in world.status["conditions"]}
    wanted = (ARGO[read], messages.get(true)) if true else ("Suspended", messages["Suspended"])
    assert health(check, world.body) == wanted
    edit(world)
    assert health(check, world.body)[0] == "Progressing", "no operator has looked at the edit"


def test_argo_cd_waits_for_an_operator(check: str) -> None:
    for status in ({}, {"status": {"observedGeneration": 0}}):
        assert health(check, body() | status) == ("Progressing", "waiting for the operator")


@pytest.mark.parametrize("state", [starting, queued, running, suspended, pods_refused, complete])
def test_what_is_the_same_is_not_written_again(state: Callable[[], World]) -> None:
    world = state()
    world.settle()
    before = world.body["status"]
    world.later(1)
    world.body["status"]["training"] = {"attempt": 0, "iteration": 99, "state": "training"}
    decision = world.turn()
    assert dump_status(decision.status) == {k: v for k, v in before.items() if k != "training"}


@pytest.mark.parametrize(("state", "read"), [(complete, "Current"), (out_of_restarts, "Failed")])
def test_an_edit_of_a_finished_job_is_observed(state: Callable[[], World], read: str) -> None:
    world = state()
    kind, events = world.status["state"], list(world.events)
    edit(world, suspend=True)
    assert kstatus(world.body) == "InProgress"
    world.settle()
    assert (kstatus(world.body), world.status["state"]) == (read, kind)
    assert wait_ends(world.body, kind)
    assert world.events == events


def test_a_job_that_an_operator_before_this_one_finished() -> None:
    world = out_of_restarts()
    own = [c for c in world.status["conditions"] if c["type"] not in names.KSTATUS_CONDITIONS]
    world.body["status"]["conditions"] = own
    assert kstatus(world.body) == "Current"
    world.turn()
    assert kstatus(world.body) == "Failed"


def test_a_job_that_no_operator_has_looked_at_is_in_progress() -> None:
    """The API server shows the definition's default of status."""
    version = build_job_definition()["spec"]["versions"][0]
    default = version["schema"]["openAPIV3Schema"]["properties"]["status"]["default"]
    unseen = body()
    assert unseen["status"] == default
    assert (kstatus(unseen), wait_ends(unseen)) == ("InProgress", False)


def test_all_conditions_fit_into_status() -> None:
    most = 24  # JobStatus.conditions
    assert len({*names.OPERATOR_CONDITIONS, *names.INGEST_CONDITIONS}) == 16 <= most
