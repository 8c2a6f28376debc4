"""A rank's metrics: its reports to the agent, scraped over HTTP, and never a reason to stop."""

from __future__ import annotations

import logging
import socket
import urllib.request
from typing import Any

import pytest
from launch import free_port
from set_clock import Clock

from pipemorph.errors import InputError
from pipemorph.planning import Op, OpKind, Route, Schedule
from pipemorph.protocol import (
    LinkSample,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
    WireTime,
)
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.agent.messages import NullControlClient, OffloadStats, RankTelemetry
from pipemorph_trainer.agent.rank_plan import RankPlan, RankStage
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.telemetry.metrics import (
    MOST_PORTS,
    RankMetrics,
    serve_metrics,
    start_metrics,
)
from pipemorph_trainer.telemetry.reporter import TelemetryReporter

PROFILE = StageProfile(
    stage=1,
    forward=0.1,
    backward_input=0.05,
    backward_weight=0.05,
    split="deferred",
    peak_memory=77,
)
WHO = {"name": "gpt", "stage": "1", "replica": "0", "column": ""}


def telemetry(iteration: int, plan_version: int = 2, **fields: Any) -> RankTelemetry:
    return RankTelemetry(
        stage=1, state="training", iteration=iteration,
        applied_plan_version=plan_version, prepared_plan_version=3, **fields,
    )  # fmt: skip


def sample(route: Route, wire: float, size: int = 1000) -> LinkSample:
    times = dict.fromkeys(("min", "p50", "p99", "mean"), wire)
    return LinkSample(
        link=1, direction="forward", route=route, transport="gloo", iteration=0, bytes=size,
        wire=WireTime(count=4, exact=4, **times), queue_p50=0.001,
    )  # fmt: skip


def read(metrics: RankMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"pipemorph_rank_{name}", WHO | labels)


def plan_of(version: int, warmup: int) -> RankPlan:
    """Plan for four microbatches on two stages, ``warmup`` in flight on each."""
    forwards = [Op(OpKind.F, i) for i in range(4)]
    backwards = [Op(kind, i) for i in range(4) for kind in (OpKind.B, OpKind.W)]
    ops = forwards[:warmup]
    for i in range(4):
        ops += backwards[2 * i : 2 * i + 2] + forwards[warmup + i : warmup + i + 1]
    order = Schedule(4, (tuple(ops),)).encode()[0]
    return RankPlan(
        version=version, digest="0" * 8, microbatches=4, stage_count=2, ops=order,
        stages=(RankStage(stage=1),),
    )  # fmt: skip


def test_telemetry_becomes_metrics() -> None:
    clock = Clock()
    metrics = RankMetrics("gpt", 1, 0, clock=clock)
    metrics.record_telemetry(telemetry(5, links=[sample(Route.DIRECT, 0.004)]))
    assert read(metrics, "reroutes_total", link="1") == 0, "so that the first one is an increase"
    clock.now += 1.0
    metrics.record_telemetry(telemetry(6, profile=PROFILE))
    assert read(metrics, "bubble_fraction") is None, "no plan has given the microbatches"
    metrics.record_plan(plan_of(0, 1))
    metrics.record_telemetry(
        telemetry(6, profile=PROFILE, links=[sample(Route.DELEGATED, 0.06, 500)])
    )
    assert read(metrics, "iteration") == 6
    assert read(metrics, "iteration_seconds") == 1.0
    assert read(metrics, "bubble_fraction") == pytest.approx(0.2)
    assert read(metrics, "applied_plan_version") == 2
    assert read(metrics, "prepared_plan_version") == 3
    assert read(metrics, "in_flight_peak") == 1
    assert read(metrics, "peak_memory_bytes") == 77
    direct = {"link": "1", "direction": "forward", "route": "direct"}
    assert read(metrics, "link_wire_seconds", **direct) == 0.004
    assert read(metrics, "link_bytes_total", **direct) == 1000
    assert read(metrics, "link_wire_seconds", **direct | {"route": "delegated"}) == 0.06
    assert read(metrics, "link_bytes_total", **direct | {"route": "delegated"}) == 500
    assert read(metrics, "link_messages_total", **direct | {"route": "delegated"}) == 4
    assert read(metrics, "reroutes_total", link="1") == 1


def test_what_went_to_host_memory_adds_up() -> None:
    metrics = RankMetrics("gpt", 1, 0)
    metrics.record_telemetry(telemetry(5))
    assert read(metrics, "offloaded_microbatches_total") is None, "nothing yet is no series"
    for iteration in (6, 7):
        moved = OffloadStats(microbatches=3, bytes=3000, seconds=0.25, host_bytes=4096)
        metrics.record_telemetry(telemetry(iteration, offloaded=moved))
    metrics.record_telemetry(telemetry(8))
    assert read(metrics, "offloaded_microbatches_total") == 6
    assert read(metrics, "offloaded_bytes_total") == 6000
    assert read(metrics, "offload_copy_seconds_total") == 0.5
    assert read(metrics, "offload_host_memory_bytes") == 4096


def test_the_agent_and_metrics_get_what_a_rank_reports() -> None:
    class Control(NullControlClient):
        def publish(self, telemetry: RankTelemetry) -> None:
            sent.append(telemetry.iteration)

    sent: list[int] = []
    metrics = RankMetrics("gpt", 1, 0)
    metrics.record_plan(plan_of(0, 1))
    reporter = TelemetryReporter(MeshShape(2).find_coordinate(1), Control(), [], metrics=metrics)
    for iteration, plan, peak in ((1, plan_of(0, 1), 1), (2, plan_of(2, 3), 3)):
        reporter.prepared = 2
        reporter.begin_iteration(iteration, plan)
        reporter.publish()
        assert read(metrics, "in_flight_peak") == peak
        assert read(metrics, "iteration") == iteration
        assert read(metrics, "prepared_plan_version") == 2
    assert sent == [1, 2]


def end(**fields: Any) -> TransportSample:
    said: dict[str, Any] = {
        "link": 1, "direction": "forward", "agreed": "rdma", "transport": "rdma",
        "fallbacks": 0, "failbacks": 0, "reconnects": 0,
    }  # fmt: skip
    return TransportSample(**said | fields)


def test_a_fallback_is_counted_and_shown() -> None:
    metrics = RankMetrics("gpt", 1, 0)
    metrics.record_telemetry(telemetry(1, transports=[end()]))
    on = {"link": "1", "agreed": "rdma"}
    assert read(metrics, "link_transport", **on, transport="rdma") == 1
    assert read(metrics, "link_fallbacks_total", link="1") == 0
    metrics.record_telemetry(
        telemetry(2, transports=[end(transport="tcp", fallbacks=2, failbacks=1)])
    )
    assert read(metrics, "link_transport", **on, transport="rdma") == 0
    assert read(metrics, "link_transport", **on, transport="tcp") == 1
    metrics.record_telemetry(telemetry(3, transports=[end(fallbacks=2, failbacks=2, reconnects=1)]))
    assert read(metrics, "link_transport", **on, transport="tcp") == 0
    counts = [
        read(metrics, f"link_{n}_total", link="1") for n in ("fallbacks", "failbacks", "reconnects")
    ]
    assert counts == [2, 2, 1]


def test_a_link_that_loses_its_data_connections_is_shown() -> None:
    metrics = RankMetrics("gpt", 1, 0)
    seen = []
    for trouble in ("", "tcp: receiving: Connection timed out", ""):
        metrics.record_telemetry(
            telemetry(1, transports=[end(agreed="tcp", transport="tcp", trouble=trouble)])
        )
        seen.append(read(metrics, "link_trouble", link="1"))
    assert seen == [0, 1, 0]


def rail(device: str = "mlx5_0", state: str = "ACTIVE", **counters: Any) -> RailSample:
    return RailSample(stage=1, device=device, port=1, state=state, counters=counters)


def test_ports_are_metrics_and_what_cannot_be_read_has_no_series() -> None:
    metrics = RankMetrics("gpt", 1, 0)
    port = {"device": "mlx5_0", "port": "1"}
    errors = port | {"counter": "symbol_error"}
    metrics.record_telemetry(
        telemetry(1, ports=1, rails=[rail(symbol_error=5, send_err="unavailable")])
    )
    assert read(metrics, "rdma_ports") == 1
    assert read(metrics, "rdma_port_active", **port) == 1
    assert read(metrics, "rdma_port_events_total", **errors) == 5
    assert read(metrics, "rdma_port_events_total", **port, counter="send_err") is None
    metrics.record_telemetry(telemetry(2, ports=1, rails=[rail(state="DOWN", symbol_error=7)]))
    assert read(metrics, "rdma_port_active", **port) == 0
    assert read(metrics, "rdma_port_events_total", **errors) == 7
    # The driver was loaded again.
    metrics.record_telemetry(telemetry(3, rails=[rail(symbol_error=2)]))
    assert read(metrics, "rdma_port_events_total", **errors) == 9
    metrics.record_telemetry(
        telemetry(4, rails=[rail(state="unavailable", symbol_error="unavailable")])
    )
    assert read(metrics, "rdma_port_active", **port) is None
    assert read(metrics, "rdma_port_events_total", **errors) is None


def test_a_host_with_hundreds_of_ports_has_series_for_some() -> None:
    metrics = RankMetrics("gpt", 1, 0)
    metrics.record_telemetry(telemetry(1, rails=[rail(f"vf{i}") for i in range(MOST_PORTS + 5)]))
    assert read(metrics, "rdma_port_active", device=f"vf{MOST_PORTS - 1}", port="1") == 1
    assert read(metrics, "rdma_port_active", device=f"vf{MOST_PORTS}", port="1") is None


def test_without_a_port_nothing_is_measured() -> None:
    context = TrainerContext.from_env({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"})
    assert start_metrics(context, MeshShape().find_coordinate(0), plan_of(0, 1)) is None


def test_they_are_served_over_http_and_a_taken_port_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    with socket.create_server(("", port)), caplog.at_level(logging.WARNING):
        assert serve_metrics("gpt", 1, 0, port, "0.0.0.0") is None
    assert f"port {port}" in caplog.text
    assert "spec.trainer.metricsPort" in caplog.text
    metrics = serve_metrics("gpt", 1, 0, port, "0.0.0.0")
    metrics.record_telemetry(telemetry(9))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'pipemorph_rank_iteration{column="",name="gpt",replica="0",stage="1"} 9.0' in text


def test_a_column_has_its_name_and_its_index() -> None:
    mesh, port = MeshShape(stages=2, replicas=2, tensor=2), free_port()
    variables = {
        "RANK": "6", "WORLD_SIZE": "8", "MASTER_PORT": "1", "PIPEMORPH_METRICS_PORT": str(port),
    }  # fmt: skip
    place = mesh.find_coordinate(6)
    metrics = start_metrics(TrainerContext.from_env(variables), place, plan_of(0, 1))
    assert metrics is not None
    metrics.record_telemetry(telemetry(9))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert (
        f'column="{mesh.format_column_name(place.column)}",name="job",replica="2",stage="1"' in text
    )
    assert mesh.format_column_name(place.column) == "replica 1, tensor 0"


def test_the_port_comes_from_the_environment() -> None:
    base = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}
    assert TrainerContext.from_env(base).metrics_port == 0
    assert TrainerContext.from_env(base | {"PIPEMORPH_METRICS_PORT": "9464"}).metrics_port == 9464
    with pytest.raises(InputError, match="PIPEMORPH_METRICS_PORT"):
        TrainerContext.from_env(base | {"PIPEMORPH_METRICS_PORT": "many"})


def test_gradient_reductions() -> None:
    metrics = RankMetrics("gpt", 1, 0, clock=Clock())
    for iteration in (1, 2):
        reduced = ReductionSample(
            stage=1, iteration=iteration, bytes=1000, buckets=2, seconds=0.5, exposed=0.2,
            waited=0.3,
        )  # fmt: skip
        metrics.record_telemetry(telemetry(iteration + 1, reduction=reduced))
        metrics.record_telemetry(telemetry(iteration + 1))
    assert read(metrics, "reduction_seconds") == 0.5
    assert read(metrics, "reduction_exposed_seconds") == 0.2
    assert read(metrics, "reduction_waited_seconds") == 0.3
    assert read(metrics, "reduction_bytes_total") == 2000
