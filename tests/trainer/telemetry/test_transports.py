"""Transports of a rank's links, from the engine into telemetry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest
from set_clock import Clock

from pipemorph_trainer.telemetry.reporter import REFRESH_SECONDS, SAMPLE_SECONDS, TransportSampler
from pipemorph_trainer.transport.message import Direction

if TYPE_CHECKING:
    from pipemorph_trainer.transport.link import LinkEnd


@dataclass
class PathStats:
    kind: str
    rail: str = ""
    last_error: str = ""


@dataclass
class Stats:
    transport: str = "rdma"
    fallbacks: int = 0
    failbacks: int = 0
    reconnects: int = 0
    paths: list[PathStats] = field(default_factory=list)


@dataclass
class EngineLink:
    """Stands for a link over rails, which this machine has none of."""

    transport: str = "rdma"
    now: Stats = field(default_factory=Stats)

    def stats(self) -> Stats:
        return self.now


@dataclass
class End:
    link: int
    sends: Direction
    engine_link: EngineLink | None


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch(clock: Clock, *ends: End) -> TransportSampler:
    return TransportSampler(cast("list[LinkEnd]", list(ends)), 2, clock=clock)


def test_a_fallback_is_reported_within_a_second_and_once(clock: Clock) -> None:
    link = EngineLink()
    down = End(4, Direction.FORWARD, link)
    up = End(3, Direction.BACKWARD, EngineLink("shm", Stats("shm")))
    seen = watch(clock, up, down)
    first = seen.take_changed()
    assert [(s.link, s.replica, s.direction, s.agreed, s.transport) for s in first] == [
        (3, 2, "backward", "shm", "shm"),
        (4, 2, "forward", "rdma", "rdma"),
    ]
    link.now = Stats(
        "tcp", fallbacks=1,
        paths=[
            PathStats("tcp"), PathStats("rdma", "rxe0 port 1", "port\nerror"),
            PathStats("rdma", "rxe1 port 1", "x" * 300),
        ],
    )  # fmt: skip
    clock.now += SAMPLE_SECONDS / 2
    assert seen.take_changed() == [], "it looks at most once a second"
    clock.now += SAMPLE_SECONDS / 2
    (status,) = seen.take_changed()
    assert (status.transport, status.agreed, status.fallbacks) == ("tcp", "rdma", 1)
    assert status.trouble.startswith("rxe0 port 1: port error; rxe1 port 1: xxx")
    assert len(status.trouble) == 200
    clock.now += SAMPLE_SECONDS
    assert seen.take_changed() == []
    link.now = Stats("rdma", fallbacks=1, failbacks=1)
    (back,) = seen.take_changed(now=True) or seen.take_changed(now=True)
    assert (back.transport, back.failbacks, back.trouble) == ("rdma", 1, "")


def test_trouble_of_sockets_is_reported_like_that_of_rails(clock: Clock) -> None:
    link = EngineLink("tcp", Stats("tcp", paths=[PathStats("tcp"), PathStats("tcp")]))
    seen = watch(clock, End(4, Direction.FORWARD, link))
    assert [s.trouble for s in seen.take_changed()] == [""]
    lost = "receiving: Connection timed out"
    link.now = Stats(
        "tcp", paths=[PathStats("tcp", last_error=lost), PathStats("tcp", last_error=lost)]
    )
    clock.now += SAMPLE_SECONDS
    (status,) = seen.take_changed()
    assert (status.transport, status.trouble) == ("tcp", f"tcp: {lost}")


def test_all_is_reported_again_every_minute(clock: Clock) -> None:
    seen = watch(clock, End(0, Direction.FORWARD, EngineLink()))
    assert len(seen.take_changed()) == 1
    clock.now += REFRESH_SECONDS - 1
    assert seen.take_changed() == []
    clock.now += SAMPLE_SECONDS
    assert len(seen.take_changed()) == 1


def test_a_link_without_the_engine_says_nothing(clock: Clock) -> None:
    assert watch(clock, End(0, Direction.FORWARD, None)).take_changed() == []
