"""What carries each link now, and which links run over less than they were made for.

The engine moves a link from its rails to TCP when the last of them is lost, and back when one
returns. That is by design, and must never be silent: it looks just like a slow link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipemorph.control.observe.events import Events
from pipemorph.wire import LinkSample, TransportSample

SHOWN = 32
MOST_COUNTED = 2**53 - 1

EndKey = tuple[int, int, str]
"""link, replica, direction"""


@dataclass(frozen=True)
class FallenLink:
    """One end of an engine link that runs over less than was agreed on. ``direction`` is the
    one that this end sends; ``trouble`` why, in the engine's words."""

    link: int
    replica: int
    direction: str
    agreed: str
    transport: str
    fallbacks: int
    trouble: str

    def record(self) -> dict[str, object]:
        """For report.json."""
        return {
            "link": self.link,
            "replica": self.replica,
            "direction": self.direction,
            "agreed": self.agreed,
            "transport": self.transport,
            "fallbacks": self.fallbacks,
            "trouble": self.trouble,
        }

    def text(self, *, replicas: bool) -> str:
        """``link 2 fell back from rdma to tcp (rxe0 port 1: port error)``"""
        where = f"link {self.link}" + (f" of replica {self.replica}" if replicas else "")
        why = f" ({self.trouble})" if self.trouble else ""
        return f"{where} fell back from {self.agreed} to {self.transport}{why}"


@dataclass(frozen=True)
class TransportsView:
    """``links``: what carries each, such as ``rdma``, ``rdma+tcp`` where replicas or directions
    differ, empty where not known. Counts are of all ends since they were made."""

    links: tuple[str, ...] = ()
    fallen_count: int = 0
    fallen: tuple[FallenLink, ...] = ()
    fallbacks: int = 0
    failbacks: int = 0


class TransportBook:
    """All links of a job: one entry per link, replica and direction."""

    def __init__(self, links: int, *, events: Events | None = None) -> None:
        self._links = links
        self._events = events or Events()
        self._carries: dict[EndKey, str] = {}
        self._ends: dict[EndKey, TransportSample] = {}
        self._fallen: dict[EndKey, TransportSample] = {}
        self._fallbacks = self._failbacks = 0

    def observe(
        self,
        links: Iterable[LinkSample],
        ends: Iterable[TransportSample],
        now: float,
        iteration: int,
    ) -> None:
        """Take in a report. ``now``: wall clock, seconds."""
        for window in links:
            self._carries[window.link, window.replica, window.direction] = window.transport
        for end in ends:
            key = (end.link, end.replica, end.direction)
            before = self._ends.get(key)
            self._fallbacks += end.fallbacks - (before.fallbacks if before else 0)
            self._failbacks += end.failbacks - (before.failbacks if before else 0)
            self._ends[key] = end
            fell = end.transport != end.agreed
            was = key in self._fallen
            if fell:
                self._fallen[key] = end
            elif was:
                del self._fallen[key]
            # Between two reports it may have fallen back and returned. What was before the
            # first one that this controller got is history.
            again = before is not None and end.fallbacks > before.fallbacks
            if (fell and not was) or again:
                text = _fallen(end).text(replicas=True) + ("" if fell else ", and is back")
                self._events.add(now, iteration, text)
            elif was and not fell:
                self._events.add(
                    now,
                    iteration,
                    f"link {end.link} of replica {end.replica} is back on {end.transport}"
                    f" ({end.direction})",
                )

    def view(self) -> TransportsView:
        """As last reported."""
        seen: list[set[str]] = [set() for _ in range(self._links)]
        for (link, _, _), transport in self._carries.items():
            seen[link].add(transport)
        fallen = [_fallen(self._fallen[key]) for key in sorted(self._fallen)]
        return TransportsView(
            links=tuple("+".join(sorted(found)) for found in seen),
            fallen_count=len({(end.link, end.replica) for end in fallen}),
            fallen=tuple(fallen[:SHOWN]),
            # What any number of ends can say together must still fit into 64 bits.
            fallbacks=min(self._fallbacks, MOST_COUNTED),
            failbacks=min(self._failbacks, MOST_COUNTED),
        )


def _fallen(end: TransportSample) -> FallenLink:
    # When it has returned already, what it fell back to was TCP all the same.
    return FallenLink(
        end.link,
        end.replica,
        end.direction,
        end.agreed,
        end.transport if end.transport != end.agreed else "tcp",
        end.fallbacks,
        end.trouble,
    )
