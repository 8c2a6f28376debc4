"""RDMA ports and fallbacks, from reports to the condition RailsHealthy, status and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from observing import Agent, tell
from operator_objects import body
from operator_status import StatusWrites, spec_of
from prometheus_client import REGISTRY

from pipemorph.control import JobController
from pipemorph.protocol import RailSample, TransportSample
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.job_status import JobStatus
from pipemorph.spec.status_links import MAX_FAULTY_PORTS
from pipemorph.views.status.summary import (
    MESSAGE_LENGTH,
    StatusInput,
    summarize_training,
    update_conditions,
)
from pipemorph_operator.ingest.job_store import ClusterJobStore
from pipemorph_operator.ingest.status.write_schedule import build_key_state

QUIET = {"link_downed": 0, "symbol_error": 0}


def rail(stage: int = 0, **fields: Any) -> RailSample:
    said: dict[str, Any] = {
        "stage": stage, "device": "mlx5_0", "port": 1, "state": "ACTIVE", "counters": QUIET,
    }  # fmt: skip
    return RailSample(**said | fields)


def end(link: int = 1, **fields: Any) -> TransportSample:
    said: dict[str, Any] = {
        "link": link, "direction": "forward", "agreed": "rdma", "transport": "rdma",
        "fallbacks": 0, "failbacks": 0, "reconnects": 0,
    }  # fmt: skip
    return TransportSample(**said | fields)


def verdict(of: JobSpec, *reports: dict[str, Any], now: float = 100.0) -> tuple[str, str, str]:
    controller = JobController(of)
    for i, fields in enumerate(reports):
        tell(controller, 90.0 + i, iteration=3, **fields)
    (found,) = [
        c
        for c in update_conditions(StatusInput(controller, 95.0, 1), [], now)
        if c.type == "RailsHealthy"
    ]
    return found.status, found.reason, found.message


FELL = end(transport="tcp", fallbacks=1, trouble="mlx5_0 port 1: port error")
PEER = end(direction="backward", transport="tcp", fallbacks=1)
DOWN = rail(1, state="DOWN")


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        (
            {"ports": None}, {},
            ("Unknown", "PortsNotReported", "not every rank has reported its ports"),
        ),
        (
            {"ports": 2, "rails": [rail(0)]}, {"ports": 2},
            ("Unknown", "PortsNotReported", "no recent reports of 1 of 2 ports"),
        ),
        (
            {"ports": 1, "rails": [rail(counters={"symbol_error": "unavailable"})]}, {"ports": 1},
            (
                "Unknown", "CountersUnavailable",
                "state or counters of 1 of 1 ports cannot be read in the pods",
            ),
        ),
        (
            {"ports": 0}, {"ports": 0},
            ("True", "NoRdmaDevices", "no rank sees an RDMA device, and none is requested"),
        ),
        (
            {"ports": 2, "rails": [rail(0), rail(1)]}, {"ports": 2},
            ("True", "PortsActive", "2 ports, all healthy"),
        ),
        (
            {"ports": 2, "rails": [rail(0), rail(1)]}, {"ports": 2, "rails": [DOWN]},
            ("False", "SickPorts", "stage 1 mlx5_0/1: is DOWN"),
        ),
        (
            {"ports": 1, "rails": [rail(counters={"np_cnp_sent": 0})]},
            {"ports": 1, "rails": [rail(counters={"np_cnp_sent": 20000})]},
            (
                "True", "NetworkCongested",
                "congestion: stage 0 mlx5_0/1: np_cnp_sent grew by at least 10000 within 60 s",
            ),
        ),
        (
            {"ports": 1, "rails": [rail()], "transports": [end()]},
            {"ports": 1, "transports": [FELL, PEER]},
            (
                "False", "LinksFellBack",
                "link 1 fell back from rdma to tcp (mlx5_0 port 1: port error)",
            ),
        ),
        (
            {"ports": 2, "rails": [rail(0), rail(1)]},
            {"ports": 2, "rails": [DOWN], "transports": [PEER]},
            (
                "False", "LinksFellBack",
                "link 1 fell back from rdma to tcp; stage 1 mlx5_0/1: is DOWN",
            ),
        ),
    ],
    ids=[
        "old ranks", "one unheard", "unreadable", "no device", "well", "down", "congested",
        "fell back", "fell back and down",
    ],
)  # fmt: skip
def test_the_condition(
    first: dict[str, Any], then: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert verdict(spec_of(), first, then) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": {"engine": "rdma"}},
        {"transport": {"engine": "rdma", "require": "rdma"}},
        {"placement": {"rdma": {"resourceName": "rdma/hca"}}},
    ],
    ids=["engine", "require", "placement"],
)
def test_a_job_that_asks_for_rdma_and_has_none_is_not_well(settings: dict[str, Any]) -> None:
    status, reason, message = verdict(spec_of(**settings), {"ports": 0})
    assert (status, reason) == ("False", "NoRdmaDevices")
    assert "device plugin" in message


def test_replicas_are_named_where_there_are_several() -> None:
    first = {"ports": 1, "rails": [rail(2, replica=1)]}
    then = {"ports": 1, "rails": [rail(2, replica=1, state="DOWN")]}
    assert verdict(spec_of(replicas=2), first, then)[2] == "stage 2 of replica 1 mlx5_0/1: is DOWN"


def test_stale_reports_and_an_ended_job_are_unknown() -> None:
    first = {"ports": 1, "rails": [rail(state="DOWN")]}
    assert verdict(spec_of(), first)[:2] == ("False", "SickPorts")
    assert verdict(spec_of(), first, now=200.0)[:2] == ("Unknown", "ReportsStale")
    controller = JobController(spec_of())
    tell(controller, 90.0, transports=[FELL], **first)
    ended = StatusInput(controller, 90.0, 1, is_over=True)
    (found,) = [c for c in update_conditions(ended, [], 91.0) if c.type == "RailsHealthy"]
    assert (found.status, found.reason) == ("Unknown", "JobFinished")
    status = summarize_training(ended, 91.0)
    assert (status.rails, status.fallen_links, status.fallen_link_count) == (None, [], 0)
    assert status.link_fallbacks == 1


def test_messages_and_lists_are_bounded() -> None:
    many = [
        rail(0, device=f"mlx5_{i}", state="DOWN", counters={"link_downed": 0}) for i in range(100)
    ]
    status, _, message = verdict(spec_of(), {"ports": 100, "rails": many})
    assert status == "False"
    assert message.endswith("; and 95 more")
    ends = [end(i % 3, trouble="x" * 200, transport="tcp", replica=i) for i in range(100)]
    _, _, message = verdict(spec_of(replicas=100), {"transports": ends})
    assert len(message) == MESSAGE_LENGTH
    controller = JobController(spec_of())
    tell(controller, 90.0, ports=100, rails=many)
    brief = summarize_training(StatusInput(controller, 90.0, 1), 91.0)
    assert (brief.rails.faulty_count, len(brief.rails.faulty_ports)) == (100, MAX_FAULTY_PORTS)


def test_status_as_the_crd_has_it() -> None:
    controller = JobController(spec_of())
    tell(controller, 90.0, ports=2, rails=[rail(0), DOWN], transports=[FELL])
    summary = summarize_training(StatusInput(controller, 90.0, 1), 91.0)
    written = JobStatus(training=summary).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert written["training"]["rails"] == {
        "ports": 2, "expectedPorts": 2, "faultyCount": 1, "congestedCount": 0,
        "unavailableCount": 0,
        "faultyPorts": [
            {
                "stage": 1, "replica": 0, "device": "mlx5_0", "port": 1, "state": "DOWN",
                "message": "is DOWN",
            }
        ],
    }  # fmt: skip
    assert written["training"]["fallenLinks"] == [
        {
            "name": "link 1 (stage 1 to 2)", "link": 1, "replica": 0, "direction": "forward",
            "agreed": "rdma",
            "transport": "tcp", "fallbacks": 1, "message": "mlx5_0 port 1: port error",
        }
    ]  # fmt: skip
    assert written["training"]["transports"] == ["", "", ""]
    assert (written["training"]["linkFallbacks"], written["training"]["linkFailbacks"]) == (1, 0)


def test_a_fallback_is_a_turn_that_is_written_at_once() -> None:
    controller = JobController(spec_of())
    tell(controller, 90.0, ports=1, rails=[rail()], transports=[end()])
    source = StatusInput(controller, 90.0, 1)
    before = build_key_state(source, controller.get_job_view(90.0), 90.0)
    tell(controller, 90.0, ports=1, rails=[rail()])
    assert build_key_state(source, controller.get_job_view(90.0), 90.0) == before
    tell(controller, 90.0, ports=1, transports=[FELL])
    assert build_key_state(source, controller.get_job_view(90.0), 90.0) != before


def gauge(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"pipemorph_job_{name}", {"namespace": "team", "name": "gpt"})


async def test_what_the_ingest_writes_and_serves_also_after_an_edit() -> None:
    api: Any = StatusWrites()
    job = body(stages=4)
    job["status"] = {"attempt": 0}
    key = ("team", "gpt")
    now = 1000.0
    store = ClusterJobStore(api, clock=lambda: now, monotonic=lambda: now)
    store.process_change(key, job)
    agent = Agent(spec_of(), job="gpt", namespace="team")
    said: tuple[dict[str, Any], ...] = (
        {"ports": 2, "rails": [rail(0), rail(1)], "transports": [end()]},
        {"ports": 2, "transports": [FELL]},
    )
    for fields in said:
        found = store.find_job(*key)
        assert found is not None
        agent.tell(found, now, **fields)
    await store.write_status_if_due(key)
    assert gauge("rails_healthy") == 0
    assert gauge("rdma_ports") == 2
    assert (gauge("fallen_links"), gauge("link_fallbacks")) == (1, 1)
    # Ranks report all of it once a minute only: an edit must not drop it.
    job["metadata"]["generation"] += 1
    job["spec"]["adaptation"] = {"minGain": 0.3}
    store.process_change(key, job)
    now += 5
    found = store.find_job(*key)
    assert found is not None
    back = end(fallbacks=1, failbacks=1)
    agent.tell(found, now, ports=2, transports=[back])
    await store.write_status_if_due(key)
    assert (gauge("rails_healthy"), gauge("fallen_links")) == (1, 0)
    store.process_change(key, None)
    await asyncio.sleep(0)  # the last event is on its way
    verdicts = [
        next((c["status"], c["reason"]) for c in s["conditions"] if c["type"] == "RailsHealthy")
        for s in api.taken
    ]
    assert verdicts == [("False", "LinksFellBack"), ("True", "PortsActive")]
    assert gauge("rails_healthy") is None
    events = [(event["type"], event["reason"]) for event in api.events]
    assert events == [("Warning", "LinksFellBack"), ("Normal", "PortsActive")]
    metadata = job["metadata"]
    assert [event["involvedObject"] for event in api.events] == 2 * [
        {"apiVersion": "pipemorph.io/v1alpha1", "kind": "PipeMorphJob"}
        | {k: metadata[k] for k in ("name", "namespace", "uid")}
    ]
