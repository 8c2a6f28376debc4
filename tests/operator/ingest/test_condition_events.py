"""What people are told of a job's links and plans, and what is not worth telling."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_api import FakeCluster
from waiting import until_async

from pipemorph.api.status import Condition
from pipemorph_operator.cluster.client import ApiRefused
from pipemorph_operator.cluster.events import MAX_MESSAGE, Event
from pipemorph_operator.ingest.status.condition_events import (
    BURST,
    EVENT_SECONDS,
    MOST_UNDER_WAY,
    ConditionEvents,
    EventSender,
)

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


def told(news: ConditionEvents, **said: str) -> list[tuple[str, str, str]]:
    return [(e.kind, e.reason, e.message) for e in news.changed(conditions(**said), 0.0)]


def test_a_link_that_turns_is_told_once_and_its_recovery_too() -> None:
    news = ConditionEvents([])
    assert told(news, LinksHealthy="NoReportsYet") == []
    # It was never otherwise.
    assert (
        told(news, LinksHealthy="AllLinksHealthy: 3 links", LinksDelegated="AllLinksDirect") == []
    )
    slow = ("Warning", "SlowLinks", "link 2 (+30 ms forward) slow")
    assert told(news, LinksHealthy="SlowLinks: link 2 (+30 ms forward) slow") == [slow]
    assert told(news, LinksHealthy="SlowLinks: link 2 (+31 ms forward) slow") == []
    # What is not known for a moment is neither trouble nor its end.
    assert told(news, LinksHealthy="NoRecentSamples: 1 of 3") == []
    assert told(news, LinksHealthy="SlowLinks: link 2 (+30 ms forward) slow") == []
    well = ("Normal", "AllLinksHealthy", "3 links, all healthy")
    assert told(news, LinksHealthy="AllLinksHealthy: 3 links, all healthy") == [well]
    assert told(news, LinksHealthy="AllLinksHealthy: 3 links, all healthy") == []


def test_every_plan_and_every_set_of_delegated_links_is_told() -> None:
    news = ConditionEvents([])
    assert told(news, ScheduleAdapted="InitialPlan", LinksDelegated="AllLinksDirect: all") == []
    assert told(news, ScheduleAdapted="PlanPending: plan v1", LinksDelegated="PlanPending") == []
    assert told(
        news,
        ScheduleAdapted="PlanInEffect: plan v1: slow",
        LinksDelegated="LinksDelegated: links 2",
    ) == [("Normal", "PlanInEffect", "plan v1: slow"), ("Normal", "LinksDelegated", "links 2")]
    # Not every state is seen: the next plan may be in effect when status is written again.
    assert told(news, ScheduleAdapted="PlanInEffect: plan v2: slower") == [
        ("Normal", "PlanInEffect", "plan v2: slower")
    ]
    assert told(
        news, ScheduleAdapted="ReturnedToInitialPlan: plan v3", LinksDelegated="AllLinksDirect: all"
    ) == [("Normal", "ReturnedToInitialPlan", "plan v3"), ("Normal", "AllLinksDirect", "all")]


def test_an_ingest_that_starts_over_does_not_repeat_what_status_says() -> None:
    before = conditions(LinksHealthy="SlowLinks: link 2", ScheduleAdapted="PlanInEffect: plan v1")
    news = ConditionEvents(before)
    assert news.changed(before, 0.0) == []
    assert told(news, LinksHealthy="AllLinksHealthy: ok") == [("Normal", "AllLinksHealthy", "ok")]


def test_of_a_link_that_comes_and_goes_one_event_a_minute_is_left() -> None:
    news, events = ConditionEvents([]), []
    for second in range(3600):
        word = "SlowLinks: link 2" if second % 2 else "AllLinksHealthy: ok"
        events += news.changed(conditions(LinksHealthy=word), float(second))
    assert BURST + 3600 / EVENT_SECONDS - 2 <= len(events) <= BURST + 3600 / EVENT_SECONDS
    assert events[0].message == "link 2"
    assert events[-1].message.startswith(f"({int(EVENT_SECONDS) - 1} events before this one were")


class Api(FakeCluster):
    """An API server that answers when the test says so."""

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


def test_nobody_waits_for_events_and_what_becomes_of_none_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = (ApiRefused(403, "Forbidden", "no"), TimeoutError())

    async def run() -> list[str]:
        api = Api(*refusals)
        sender = EventSender(api)
        long = [Event("Normal", "R", f"{i} {'x' * 5000}") for i in range(MOST_UNDER_WAY + 3)]
        sender.send(JOB, long)
        api.go.set()
        await until_async(lambda: not sender._under_way, lambda: f"{len(api.messages)} are written")
        sender.send(JOB, [Event("Warning", "Later", "again")])
        await until_async(lambda: api.messages[-1] == "again", lambda: api.messages[-1])
        return api.messages

    with caplog.at_level(logging.WARNING):
        messages = asyncio.run(run())
    lengths = [len(message) for message in messages]
    assert lengths == [MAX_MESSAGE] * (MOST_UNDER_WAY - 2) + [len("again")]
    said = "\n".join(caplog.messages)
    assert said.count("too many events in progress: dropped R") == 3
    assert said.count("event R was rejected") == 1
    assert said.count("event R was not written: TimeoutError") == 1
