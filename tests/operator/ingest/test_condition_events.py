"""Events about a job's links and plans, and what is not worth one."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_api import FakeCluster
from waiting import until_async

from pipemorph.spec.job_status import Condition
from pipemorph_operator.ingest.status.condition_events import (
    BURST,
    EVENT_SECONDS,
    MAX_CONCURRENT_WRITES,
    ConditionEventFilter,
    EventSender,
)
from pipemorph_operator.kube.client import KubeApiError
from pipemorph_operator.kube.events import MAX_MESSAGE, KubeEvent

JOB = {"name": "gpt", "namespace": "team", "uid": "u1"}


def conditions(**said: str) -> list[Condition]:
    """``LinksHealthy="SlowLinks: link 2"``: its reason and its message."""
    return [
        Condition(
            type=kind,
            status="Unknown",
            last_transition_time="2026-01-01T00:00:00Z",
            reason=word.partition(": ")[0],
            message=word.partition(": ")[2],
        )
        for kind, word in said.items()
    ]


def sent(news: ConditionEventFilter, **said: str) -> list[tuple[str, str, str]]:
    return [(e.kind, e.reason, e.message) for e in news.select_events(conditions(**said), 0.0)]


def test_a_link_that_turns_is_one_event_and_its_recovery_too() -> None:
    news = ConditionEventFilter([])
    assert sent(news, LinksHealthy="NoReportsYet") == []
    # The links were never slow.
    assert (
        sent(news, LinksHealthy="AllLinksHealthy: 3 links", LinksDelegated="AllLinksDirect") == []
    )
    slow = ("Warning", "SlowLinks", "link 2 (+30 ms forward) slow")
    assert sent(news, LinksHealthy="SlowLinks: link 2 (+30 ms forward) slow") == [slow]
    assert sent(news, LinksHealthy="SlowLinks: link 2 (+31 ms forward) slow") == []
    # A state that is unknown for a moment is neither trouble nor its end.
    assert sent(news, LinksHealthy="NoRecentSamples: 1 of 3") == []
    assert sent(news, LinksHealthy="SlowLinks: link 2 (+30 ms forward) slow") == []
    well = ("Normal", "AllLinksHealthy", "3 links, all healthy")
    assert sent(news, LinksHealthy="AllLinksHealthy: 3 links, all healthy") == [well]
    assert sent(news, LinksHealthy="AllLinksHealthy: 3 links, all healthy") == []


def test_every_plan_and_every_set_of_delegated_links_is_an_event() -> None:
    news = ConditionEventFilter([])
    assert sent(news, ScheduleAdapted="InitialPlan", LinksDelegated="AllLinksDirect: all") == []
    assert sent(news, ScheduleAdapted="PlanPending: plan v1", LinksDelegated="PlanPending") == []
    assert sent(
        news,
        ScheduleAdapted="PlanInEffect: plan v1: slow",
        LinksDelegated="LinksDelegated: links 2",
    ) == [("Normal", "PlanInEffect", "plan v1: slow"), ("Normal", "LinksDelegated", "links 2")]
    # States may be missed: the next plan may be in effect when status is written again.
    assert sent(news, ScheduleAdapted="PlanInEffect: plan v2: slower") == [
        ("Normal", "PlanInEffect", "plan v2: slower")
    ]
    assert sent(
        news, ScheduleAdapted="ReturnedToInitialPlan: plan v3", LinksDelegated="AllLinksDirect: all"
    ) == [("Normal", "ReturnedToInitialPlan", "plan v3"), ("Normal", "AllLinksDirect", "all")]


def test_an_ingest_that_starts_over_does_not_repeat_what_status_says() -> None:
    before = conditions(LinksHealthy="SlowLinks: link 2", ScheduleAdapted="PlanInEffect: plan v1")
    news = ConditionEventFilter(before)
    assert news.select_events(before, 0.0) == []
    assert sent(news, LinksHealthy="AllLinksHealthy: ok") == [("Normal", "AllLinksHealthy", "ok")]


def test_a_link_that_comes_and_goes_is_one_event_a_minute() -> None:
    news, events = ConditionEventFilter([]), []
    for second in range(3600):
        word = "SlowLinks: link 2" if second % 2 else "AllLinksHealthy: ok"
        events += news.select_events(conditions(LinksHealthy=word), float(second))
    assert BURST + 3600 / EVENT_SECONDS - 2 <= len(events) <= BURST + 3600 / EVENT_SECONDS
    assert events[0].message == "link 2"
    assert events[-1].message.startswith(f"({int(EVENT_SECONDS) - 1} earlier events were omitted)")


class Api(FakeCluster):
    """API server that answers when the test lets it."""

    def __init__(self, *refusals: Exception) -> None:
        super().__init__()
        self.refusals = list(refusals)
        self.go = asyncio.Event()

    @property
    def messages(self) -> list[str]:
        return [each["message"] for each in self.objects.values()]

    async def arrives(self, verb: str, url: str) -> None:
        await self.go.wait()
        if self.refusals:
            raise self.refusals.pop(0)


def test_events_block_no_job_and_their_failures_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = (KubeApiError(403, "Forbidden", "no"), TimeoutError())

    async def run() -> list[str]:
        api = Api(*refusals)
        sender = EventSender(api)
        long = [
            KubeEvent("Normal", "R", f"{i} {'x' * 5000}") for i in range(MAX_CONCURRENT_WRITES + 3)
        ]
        sender.send_events(JOB, long)
        api.go.set()
        await until_async(lambda: not sender._under_way, lambda: f"{len(api.messages)} are written")
        sender.send_events(JOB, [KubeEvent("Warning", "Later", "again")])
        await until_async(lambda: api.messages[-1] == "again", lambda: api.messages[-1])
        return api.messages

    with caplog.at_level(logging.WARNING):
        messages = asyncio.run(run())
    lengths = [len(message) for message in messages]
    assert lengths == [MAX_MESSAGE] * (MAX_CONCURRENT_WRITES - 2) + [len("again")]
    said = "\n".join(caplog.messages)
    assert said.count("too many events in progress: dropped R") == 3
    assert said.count("event R was rejected") == 1
    assert said.count("event R was not written: TimeoutError") == 1
