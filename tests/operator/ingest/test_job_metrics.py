"""A job's metrics: the figures of its status, and none once it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import REGISTRY

from pipemorph.control import Health, LinkState
from pipemorph.spec.job_status import AdaptationSummary, Condition, TrainingStatus
from pipemorph.spec.status_links import FallenLinkStatus, SlowLink
from pipemorph.views.status import job_metrics
from pipemorph.views.status.job_metrics import remove_job_series

JOB = ("team", "figures")
NOW = "2026-01-01T00:00:00Z"


def value(name: str, **labels: str) -> float | None:
    of = {"namespace": JOB[0], "name": JOB[1]}
    return REGISTRY.get_sample_value(f"pipemorph_job_{name}", of | labels)


def link(number: int, delay: float, replica: int = 0) -> SlowLink:
    return SlowLink(
        link=number, replica=replica, direction="forward", delay_ms=delay, wire_time_ms=delay + 2.5,
        confidence=0.9,
    )  # fmt: skip


def show(*slow: SlowLink, links: Sequence[LinkState] = (), **changes: Any) -> None:
    training = TrainingStatus(slow_links=list(slow), **changes)
    job_metrics.update_job_metrics(JOB, training, [], None, recoveries=2, links=links)


def test_each_slow_link_has_its_delay_and_base_until_it_recovers() -> None:
    show(link(0, 60.0), link(2, 20.0, replica=1))
    assert value("link_delay_seconds", link="0", replica="0") == 0.06
    assert value("link_base_seconds", link="0", replica="0") == 0.0025
    assert value("link_delay_seconds", link="2", replica="1") == 0.02
    # Another column has become the slowest of link 2, and link 0 is well again.
    show(link(2, 25.0))
    assert value("link_delay_seconds", link="2", replica="0") == 0.025
    for number, replica in (("0", "0"), ("2", "1")):
        assert value("link_delay_seconds", link=number, replica=replica) is None
        assert value("link_base_seconds", link=number, replica=replica) is None
    remove_job_series(*JOB)
    assert value("link_delay_seconds", link="2", replica="0") is None
    show(link(2, 30.0))
    assert value("link_delay_seconds", link="2", replica="0") == 0.03
    remove_job_series(*JOB)


def test_a_change_of_plan_that_is_held_back() -> None:
    show()
    assert value("plan_held_back") is None
    for reason, held in (("PlanHeldBack", 1.0), ("InitialPlan", 0.0)):
        condition = Condition(
            type="ScheduleAdapted",
            status="False",
            reason=reason,
            message="",
            last_transition_time=NOW,
        )
        job_metrics.update_job_metrics(JOB, TrainingStatus(), [condition], None, recoveries=0)
        assert value("plan_held_back") == held
    remove_job_series(*JOB)
    assert value("plan_held_back") is None


def test_the_goodput_and_the_last_report_once_they_are_known() -> None:
    show()
    assert value("goodput_fraction") is None
    job_metrics.update_job_metrics(JOB, TrainingStatus(), [], 17.0, recoveries=0, goodput=0.875)
    assert value("goodput_fraction") == 0.875
    assert value("last_report_timestamp_seconds") == 17.0
    remove_job_series(*JOB)


def test_a_link_has_a_state_from_the_first_time_that_it_is_not_healthy() -> None:
    def states() -> list[float | None]:
        return [value("link_state", link=str(number)) for number in range(4)]

    show()
    assert states() == [None] * 4 and value("recoveries") == 2
    show(link(1, 60.0), routes=["direct"] * 4)
    assert states() == [None, 1, None, None]
    fallen = FallenLinkStatus(
        link=3, agreed="rdma", transport="tcp", direction="forward", message="", replica=0
    )
    show(link(1, 60.0), routes=["direct", "delegated", "delegated", "direct"],
         fallen_links=[fallen])  # fmt: skip
    assert states() == [None, 2, 3, 4]
    show(routes=["direct"] * 4)
    assert states() == [None, 0, 0, 0]
    remove_job_series(*JOB)
    assert states() == [None] * 4
    show(routes=["delegated"] * 500)
    assert value("link_state", link="63") == 3 and value("link_state", link="64") is None
    remove_job_series(*JOB)
    assert value("link_state", link="63") is None and value("recoveries") is None


def test_a_link_is_narrow_and_unknown_as_the_controller_sees_it() -> None:
    def states() -> list[float | None]:
        return [value("link_state", link=str(number)) for number in range(4)]

    def seen(*healths: Health, narrow: int = 9) -> list[LinkState]:
        return [
            LinkState(i, health, delay=0.06, transfer=0.05 if i == narrow else 0.0)
            for i, health in enumerate(healths)
        ]

    well, slow, unknown = Health.HEALTHY, Health.SLOW, Health.UNKNOWN
    show(links=seen(unknown, unknown, unknown, unknown))
    assert states() == [None] * 4, "nothing was measured yet"
    show(links=seen(well, well, slow, unknown, narrow=2))
    assert states() == [None, None, 5, None]
    show(links=seen(well, unknown, slow, unknown, narrow=2), routes=["direct"] * 2 + ["delegated"])
    assert states() == [None, 6, 2, None]
    show(links=seen(unknown, unknown, unknown, unknown), routes=["direct"] * 2 + ["delegated"])
    assert states() == [6, 6, 6, None]
    show(links=seen(well, well, well, well))
    assert states() == [0, 0, 0, None]
    remove_job_series(*JOB)
    show(links=seen(*[unknown] * 3))
    assert states() == [None] * 4, "another job of that name"
    remove_job_series(*JOB)


def test_unknown_links_take_no_series_from_others() -> None:
    links = [LinkState(i, Health.HEALTHY) for i in range(100)]
    show(links=links)
    links[:80] = [LinkState(i, Health.UNKNOWN) for i in range(80)]
    links[90] = LinkState(90, Health.SLOW, delay=0.06)
    show(links=links)
    assert value("link_state", link="90") == 1
    assert value("link_state", link="62") == 6 and value("link_state", link="63") is None
    remove_job_series(*JOB)


def test_the_gain_of_the_newest_change() -> None:
    def change(**values: Any) -> AdaptationSummary:
        base = {
            "plan_version": 1, "kind": "adapt", "reason": "", "detected_at_iteration": 1,
            "detected_at": "2026-01-01T00:00:00Z", "promised": 0.5,
        }  # fmt: skip
        return AdaptationSummary(**(base | values))

    show(last_adaptation=change())
    assert (value("promised_gain_fraction"), value("measured_gain_fraction")) == (0.5, None)
    show(last_adaptation=change(measured=-0.1))
    assert (value("promised_gain_fraction"), value("measured_gain_fraction")) == (0.5, -0.1)
    show(last_adaptation=change(kind="return", measured=0.2))
    assert (value("promised_gain_fraction"), value("measured_gain_fraction")) == (None, None)
    remove_job_series(*JOB)


def test_idle_seconds_are_counted_by_cause() -> None:
    def count(**totals: float) -> None:
        job_metrics.update_job_metrics(JOB, TrainingStatus(), [], None, recoveries=0, idle=totals)

    count(link=2.0, data=1.0)
    count(link=5.0, data=1.0)
    assert value("idle_seconds_total", cause="link") == 5.0
    # Another host of the job counts from 0.
    count(link=1.0)
    assert value("idle_seconds_total", cause="link") == 6.0
    assert value("idle_seconds_total", cause="data") == 1.0
    remove_job_series(*JOB)
    assert value("idle_seconds_total", cause="link") is None
