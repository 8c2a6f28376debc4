"""The chart's dashboards: a real Prometheus that has scraped the exports of the operator, the
ingest and the ranks of this release answers all their queries. Grafana itself does not run here."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, start_http_server
from rendered_chart import rendered
from testbed import TestbedError
from testbed.prometheus import Server, Target

from pipemorph.control import Health, LinkState
from pipemorph.planning import Op, OpKind, Route, Schedule
from pipemorph.protocol import LinkSample, RailSample, StageProfile, TransportSample, WireTime
from pipemorph.spec.job_status import AdaptationSummary, TrainingStatus
from pipemorph.spec.status_links import FallenLinkStatus, SlowLink
from pipemorph.views.status import job_metrics
from pipemorph_operator import metrics
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.rank_plan import RankPlan, RankStage
from pipemorph_trainer.telemetry.metrics import RankMetrics

DOCS = "https://docs.example/pipemorph"
JOB = ("team", "gpt")
SETTLE_SECONDS = 60.0
NAMES = ("job", "platform")
TESTBEDS = ("api", "prometheus")


@pytest.fixture(scope="module")
def dashboards() -> dict[str, dict[str, Any]]:
    """Dashboards that the chart makes."""
    return made(**{"metrics.dashboard.docs": DOCS})


def made(**values: str) -> dict[str, dict[str, Any]]:
    (found,) = (
        each["data"]
        for each in rendered(**{"metrics.dashboard.enabled": True}, **values)
        if each["metadata"]["name"].endswith("-dashboard")
    )
    assert set(found) == {f"pipemorph-{name}.json" for name in NAMES}
    return {name: json.loads(found[f"pipemorph-{name}.json"]) for name in NAMES}


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and expression of each query."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for each in dashboard["annotations"]["list"]:
        yield f"annotation {each['name']}", each["expr"]


def filled(expression: str) -> str:
    """Fill in the values of the dashboard's variables."""
    return expression.replace("$namespace", JOB[0]).replace("$name", JOB[1])


# --- what there is to scrape --------------------------------------------------------------------


def show(plan: int, recoveries: int) -> None:
    """A job with a slow link, one that fell back, and a plan for the former."""
    slow = SlowLink(
        link=1, replica=0, direction="forward", delay_ms=60, wire_time_ms=62, confidence=1
    )
    change = AdaptationSummary(
        plan_version=plan, kind="adapt", reason="", detected_at="2026-01-01T00:00:00Z",
        detected_at_iteration=3, promised=0.5, measured=0.48,
    )  # fmt: skip
    training = TrainingStatus(
        iteration=7, iteration_seconds=0.5, bubble_fraction=0.2, slow_link_count=1,
        slow_links=[slow], routes=["direct", "delegated", "direct"], peak_memory=[1 << 30],
        wanted_plan_version=plan, applied_plan_version=plan, adaptations=plan, saved_seconds=9.0,
        saved_error_seconds=2.0, last_adaptation=change, fallen_link_count=1,
        fallen_links=[
            FallenLinkStatus(link=2, direction="forward", agreed="rdma", transport="tcp")
        ],
    )  # fmt: skip
    narrow = LinkState(3, Health.SLOW, delay=0.06, transfer=0.05)
    silent = LinkState(4, Health.HEALTHY if plan == 1 else Health.UNKNOWN)
    job_metrics.update_job_metrics(
        JOB, training, [], time.time(), recoveries=recoveries, goodput=0.9, links=[narrow, silent],
        idle={"link": float(plan), "bubble": 0.5 * plan},
    )  # fmt: skip
    values = (("faulty_rdma_ports", 1.0), ("congested_rdma_ports", 1.0))
    job_metrics.set_job_gauges(*JOB, values)


def serve_platform() -> None:
    """Work of the operator and the ingest, as they count it."""
    for counter in metrics.JOBS.values():
        counter.labels(job_namespace="team").inc()
    metrics.API_REQUESTS.labels("GET", "200").inc()
    metrics.WATCH_CONFIRMED.labels("Job", "").set_to_current_time()
    metrics.RECONCILES.labels("done").observe(0.01)
    metrics.REPORTS.labels("report", "200").inc()
    metrics.REPORT_SECONDS.observe(0.002)
    metrics.REFUSED.labels("silent").inc()
    metrics.PLAN_SECONDS.observe(0.1)
    metrics.PLAN_WAIT_SECONDS.observe(0.01)
    metrics.STATUS_WRITES.labels("written").inc()
    metrics.NODE_ACCUSING_JOBS.labels("n7").set(2)
    for gauge in metrics.LEADS.values():
        gauge.set(1)


def hear(rank: RankMetrics, turn: int) -> None:
    """Receive a message from a rank at its agent, with every field that a rank may send."""
    times = dict.fromkeys(("min", "p50", "p99", "mean"), 0.06)
    link = LinkSample(
        link=1, direction="forward", route=Route.DELEGATED if turn % 2 else Route.DIRECT,
        transport="gloo", iteration=turn, bytes=1000,
        wire=WireTime(count=4, exact=4, **times), queue_p50=0.001,
    )  # fmt: skip
    end = TransportSample(
        link=1, direction="forward", agreed="rdma", transport="tcp", fallbacks=turn, failbacks=turn,
        reconnects=0,
    )  # fmt: skip
    rail = RailSample(
        stage=1, device="mlx5_0", port=1, state="ACTIVE",
        counters={"out_of_sequence": turn, "np_cnp_sent": turn},
    )  # fmt: skip
    profile = StageProfile(
        stage=1, forward=0.01, backward_input=0.01, backward_weight=0.01, split="emulated",
        peak_memory=1 << 30,
    )  # fmt: skip
    rank.record_telemetry(
        RankTelemetry(
            stage=1, state="training", iteration=turn, applied_plan_version=2,
            prepared_plan_version=2, profile=profile, links=[link], transports=[end], ports=1,
            rails=[rail],
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    rank = RankMetrics("gpt", 1, 0)
    order = Schedule(1, ((Op(OpKind.F, 0), Op(OpKind.B, 0), Op(OpKind.W, 0)),)).encode()[0]
    rank.record_plan(
        RankPlan(
            version=0, digest="0" * 8, microbatches=1, stage_count=2, ops=order,
            stages=(RankStage(stage=1),),
        )
    )  # fmt: skip
    served = [start_http_server(0, "127.0.0.1", registry) for registry in (REGISTRY, rank.registry)]
    # Labels of the chart's ServiceMonitor and PodMonitor.
    labels = {"pod": "ingest-0"}, {"namespace": JOB[0], "pod": "gpt-1"}
    targets = [Target(each.server_port, of) for (each, _), of in zip(served, labels, strict=True)]
    found = Server(tmp_path_factory.mktemp("prometheus"), targets)
    try:
        began, turn = time.monotonic(), 0
        while time.monotonic() - began < SETTLE_SECONDS:
            turn += 1
            serve_platform()
            hear(rank, turn)
            show(plan=1 + turn // 4, recoveries=turn // 4)
            time.sleep(0.5)
            seen = found.ask("changes(pipemorph_job_applied_plan_version[1m]) > 0")
            if seen and found.ask("count_over_time(pipemorph_rank_iteration[1m]) > 4"):
                break
        yield found
    finally:
        found.close()
        for each, _ in served:
            each.shutdown()
            each.server_close()
        job_metrics.remove_job_series(*JOB)


@pytest.mark.parametrize("name", NAMES)
def test_every_query_finds_what_is_exported(
    name: str, dashboards: dict[str, dict[str, Any]], server: Server
) -> None:
    empty = []
    for title, expression in queries(dashboards[name]):
        query = filled(expression)
        assert "$" not in query, f"{title}: a variable that the dashboard does not have"
        if not server.ask(query):
            empty.append((title, query))
    # Only these need what this job does not have.
    known = {"pipemorph_job_unknown_links", "pipemorph_job_slow_reductions"}
    assert [each for each in empty if not any(word in each[1] for word in known)] == []


@pytest.mark.parametrize("name", NAMES)
def test_variables_have_values(
    name: str, dashboards: dict[str, dict[str, Any]], server: Server
) -> None:
    for variable in dashboards[name]["templating"]["list"]:
        if variable["type"] != "query":
            continue
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
        assert found is not None, variable["query"]
        rows = server.ask(filled(found.group(1)))
        known = dict(zip(("namespace", "name"), JOB, strict=True))
        assert known[found.group(2)] in {row["metric"][found.group(2)] for row in rows}


def test_a_lane_per_link_with_its_state(
    dashboards: dict[str, dict[str, Any]], server: Server
) -> None:
    (panel,) = (p for p in dashboards["job"]["panels"] if p["type"] == "state-timeline")
    (target,) = panel["targets"]
    rows = server.ask(filled(target["expr"]))
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    states = {row["metric"]["link"]: mapping["options"][row["value"][1]]["text"] for row in rows}
    assert states == {"1": "slow, delegated", "2": "fell back", "3": "narrow", "4": "unknown"}
    assert set(mapping["options"]) == {str(int(state)) for state in job_metrics.LinkStateCode}


def test_legends_have_no_label_that_is_empty_without_columns(
    dashboards: dict[str, dict[str, Any]],
) -> None:
    for dashboard in dashboards.values():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                assert "{{column}}" not in target.get("legendFormat", ""), panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_rows_and_do_not_overlap(
    name: str, dashboards: dict[str, dict[str, Any]]
) -> None:
    panels = dashboards[name]["panels"]
    assert panels[0]["type"] == "row"
    kinds = {panel["type"] for panel in panels}
    assert {"row", "stat", "timeseries"} <= kinds
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(numbers)


def test_links_lead_from_one_to_the_other_to_pods_and_to_the_documentation(
    dashboards: dict[str, dict[str, Any]],
) -> None:
    uids = {name: board["uid"] for name, board in dashboards.items()}
    for name, other in (("job", "platform"), ("platform", "job")):
        urls = [link["url"] for link in dashboards[name]["links"]]
        assert f"/d/{uids[other]}/{uids[other]}" in urls and DOCS in urls
    assert "var-pod=${__field.labels.pod}" in json.dumps(dashboards["job"])
    assert f"/d/{uids['job']}/" in json.dumps(dashboards["platform"]["panels"])
    assert DOCS not in json.dumps(made())


def test_the_ingest_gets_further_environment() -> None:
    def template(name: str) -> list[dict[str, Any]]:
        return rendered(**{"ingest.env": [{"name": name, "value": "http://proxy:3128"}]})

    (ingest,) = (
        each
        for each in template("HTTPS_PROXY")
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("-ingest")
    )
    (container,) = ingest["spec"]["template"]["spec"]["containers"]
    names = [each["name"] for each in container["env"]]
    assert names == ["PIPEMORPH_LOG", "POD_NAME", "HTTPS_PROXY"]
    assert container["env"][-1]["value"] == "http://proxy:3128"
    with pytest.raises(TestbedError, match="env"):
        template("POD_NAME")
