"""What carries a rank's links, from the engine into telemetry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest
from set_clock import Clock

from pipemorph_trainer.links.message import Direction
from pipemorph_trainer.telemetry.reporter import LOOK_SECONDS, REFRESH_SECONDS, TransportWatch

if TYPE_CHECKING:
    from pipemorph_trainer.links.link import LinkEnd


@dataclass
class PathStats:
    kind: str
    rail: str = ""
    trouble: str = ""


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


def watch(clock: Clock, *ends: End) -> TransportWatch:
    return TransportWatch(cast("list[LinkEnd]", list(ends)), 2, clock=clock)


def test_a_fallback_is_told_within_a_second_and_once(clock: Clock) -> None:
    link = EngineLink()
    down = End(4, Direction.FORWARD, link)
    up = End(3, Direction.BACKWARD, EngineLink("shm", Stats("shm")))
    seen = watch(clock, up, down)
    first = seen.take()
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
    clock.now += LOOK_SECONDS / 2
    assert seen.take() == [], "it looks at most once a second"
    clock.now += LOOK_SECONDS / 2
    (told,) = seen.take()
    assert (told.transport, told.agreed, told.fallbacks) == ("tcp", "rdma", 1)
    assert told.trouble.startswith("rxe0 port 1: port error; rxe1 port 1: xxx")
    assert len(told.trouble) == 200
    clock.now += LOOK_SECONDS
    assert seen.take() == []
    link.now = Stats("rdma", fallbacks=1, failbacks=1)
    (back,) = seen.take(now=True) or seen.take(now=True)
    assert (back.transport, back.failbacks, back.trouble) == ("rdma", 1, "")


def test_trouble_of_sockets_is_told_like_that_of_rails(clock: Clock) -> None:
    link = EngineLink("tcp", Stats("tcp", paths=[PathStats("tcp"), PathStats("tcp")]))
    seen = watch(clock, End(4, Direction.FORWARD, link))
    assert [s.trouble for s in seen.take()] == [""]
    lost = "receiving: Connection timed out"
    link.now = Stats("tcp", paths=[PathStats("tcp", trouble=lost), PathStats("tcp", trouble=lost)])
    clock.now += LOOK_SECONDS
    (told,) = seen.take()
    assert (told.transport, told.trouble) == ("tcp", f"tcp: {lost}")


def test_all_is_told_again_every_minute(clock: Clock) -> None:
    seen = watch(clock, End(0, Direction.FORWARD, EngineLink()))
    assert len(seen.take()) == 1
    clock.now += REFRESH_SECONDS - 1
    assert seen.take() == []
    clock.now += LOOK_SECONDS
    assert len(seen.take()) == 1


def test_a_link_without_the_engine_says_nothing(clock: Clock) -> None:
    assert watch(clock, End(0, Direction.FORWARD, None)).take() == []
