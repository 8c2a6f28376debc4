"""Tracks the transport that carries each link, and the links that fell back to a slower one.

The engine moves a link from its rails to TCP when the last rail is lost, and back when one returns.
This must be visible to the user, since otherwise it looks like a slow link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.events import Events
from pipemorph.wire import SHOWN, FallenLink, LinkSample, TransportSample, TransportsView

MOST_COUNTED = 2**53 - 1

EndKey = tuple[int, int, str]
"""link, replica, direction"""


class TransportBook:
    """Transports of a job, per link, column and direction."""

    def __init__(self, mesh: MeshShape, *, events: Events | None = None) -> None:
        self._mesh = mesh
        self._events = events or Events()
        self._carries: dict[EndKey, str] = {}
        self._carried: list[Counter[str]] = [Counter() for _ in range(mesh.stages - 1)]
        """Per link, the number of directions that each transport carries."""
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
        """Process a report. ``now``: wall clock, seconds."""
        for window in links:
            where = (window.link, window.replica, window.direction)
            before = self._carries.get(where)
            if before != window.transport:
                self._carries[where] = window.transport
                counts = self._carried[window.link]
                counts[window.transport] += 1
                if before is not None:
                    counts[before] -= 1
        for end in ends:
            key = (end.link, end.replica, end.direction)
            known = self._ends.get(key)
            self._fallbacks += end.fallbacks - (known.fallbacks if known else 0)
            self._failbacks += end.failbacks - (known.failbacks if known else 0)
            self._ends[key] = end
            fell = end.transport != end.agreed
            was = key in self._fallen
            if fell:
                self._fallen[key] = end
            elif was:
                del self._fallen[key]
            # It may have fallen back and returned between two reports. Fallbacks before the first
            # report to this controller do not count.
            again = known is not None and end.fallbacks > known.fallbacks
            if (fell and not was) or again:
                text = _fallen(end).text(self._mesh) + ("" if fell else ", and is back")
                self._events.add(now, iteration, text)
            elif was and not fell:
                self._events.add(
                    now,
                    iteration,
                    f"{_where(end, self._mesh)} is back on {end.transport} ({end.direction})",
                )

    def view(self) -> TransportsView:
        """The transports as last reported."""
        fallen = [_fallen(self._fallen[key]) for key in sorted(self._fallen)]
        return TransportsView(
            links=tuple("+".join(sorted(+counts)) for counts in self._carried),
            fallen_count=len({(end.link, end.replica) for end in fallen}),
            fallen=tuple(fallen[:SHOWN]),
            # Bounded, so that status can store the sum over many ends.
            fallbacks=min(self._fallbacks, MOST_COUNTED),
            failbacks=min(self._failbacks, MOST_COUNTED),
        )


def merge_transports(views: Sequence[TransportsView]) -> TransportsView:
    """One view of the links of several parts of a job."""
    if len(views) == 1:
        return views[0]
    fallen = sorted(
        (end for view in views for end in view.fallen),
        key=lambda end: (end.link, end.replica, end.direction),
    )
    # The ends of a link may be in different parts. What a part does not list is counted.
    unlisted = sum(view.fallen_count - len(_links(view.fallen)) for view in views)
    named = [view.links for view in views if view.links]
    return TransportsView(
        links=tuple(map(_joined, zip(*named, strict=True))),
        fallen_count=len(_links(fallen)) + unlisted,
        fallen=tuple(fallen[:SHOWN]),
        fallbacks=min(sum(view.fallbacks for view in views), MOST_COUNTED),
        failbacks=min(sum(view.failbacks for view in views), MOST_COUNTED),
    )


def _joined(names: Iterable[str]) -> str:
    """``rdma`` and ``rdma+tcp`` are ``rdma+tcp``."""
    return "+".join(sorted({each for name in names for each in name.split("+") if each}))


def _links(fallen: Iterable[FallenLink]) -> set[tuple[int, int]]:
    return {(end.link, end.replica) for end in fallen}


def _where(end: TransportSample, mesh: MeshShape) -> str:
    column = mesh.column_name(end.replica)
    return f"link {end.link}{' of ' if column else ''}{column}"


def _fallen(end: TransportSample) -> FallenLink:
    # A link that has returned already fell back to TCP: there is nothing else.
    return FallenLink(
        end.link,
        end.replica,
        end.direction,
        end.agreed,
        end.transport if end.transport != end.agreed else "tcp",
        end.fallbacks,
        end.trouble,
    )
