"""What is on the screen of top, and what keys change about it. No terminal, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipemorph.explain.cluster_job import ClusterJob
from pipemorph.explain.story import plural
from pipemorph.top.job import ORDERS as LINK_ORDERS
from pipemorph.top.job import job_page
from pipemorph.top.jobs import ORDERS, jobs_table, ordered
from pipemorph.top.page import BARS, Line, Span, fact, line
from pipemorph.top.seen import Seen
from pipemorph.top.times import clock


@dataclass
class Browser:
    """``only``: whether one job was asked for, so that there is no list to go back to."""

    title: str
    only: bool = False
    namespaced: bool = True
    bars: str = BARS
    jobs: list[ClusterJob] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be read."""
    opened: str | None = None
    order: str = "name"
    link_order: str = "delay"
    reverse: bool = False
    over: bool = False
    """Whether the user wants to leave."""
    _seen: dict[str, Seen] = field(default_factory=dict)
    _chosen: str | None = None
    _top: int = 0
    """First line that is shown of what does not fit."""

    def take(self, jobs: Sequence[ClusterJob], notes: Sequence[str]) -> None:
        """New answers of the cluster."""
        self.jobs, self.notes = list(jobs), list(notes)
        self._seen = {job.name: self._seen.get(job.name, Seen()) for job in jobs}
        for job in jobs:
            self._seen[job.name].look(job)
        if self.only and jobs:
            self.opened = jobs[0].name

    def press(self, key: str) -> None:
        """``up``, ``down``, ``enter``, ``back``, or a character."""
        names = [job.name for job in ordered(self.jobs, self.order, reverse=self.reverse)]
        if key == "q":
            self.over = True
        elif self.opened is not None:
            self._press_in_job(key)
        elif key in ("up", "k", "down", "j") and names:
            step = 1 if key in ("down", "j") else -1
            at = names.index(self._chosen) + step if self._chosen in names else 0
            self._chosen = names[min(max(at, 0), len(names) - 1)]
        elif key == "enter" and names:
            self.opened = self._chosen if self._chosen in names else names[0]
            self._chosen, self._top = self.opened, 0
        elif key == "s":
            self.order = _after(list(ORDERS), self.order)
        elif key == "r":
            self.reverse = not self.reverse

    def _press_in_job(self, key: str) -> None:
        if key == "back" and not self.only:
            self.opened, self._top = None, 0
        elif key == "s":
            self.link_order = _after(LINK_ORDERS, self.link_order)
        elif key in ("up", "k"):
            self._top = max(0, self._top - 1)
        elif key in ("down", "j"):
            self._top += 1

    def page(self, now: float, width: int, height: int) -> list[Line]:
        """As many lines as the screen has at most, the last of which names the keys."""
        found = next((job for job in self.jobs if job.name == self.opened), None)
        if self.opened is None:
            body, at, fixed = self._list(width)
            keys = f"s sort by {_after(list(ORDERS), self.order)}  r reverse  q quit"
            keys = "up/down choose  enter open  " + keys
        else:
            body, at, fixed = self._job(found, now, width)
            back = "" if self.only else "b back  "
            keys = f"{back}s sort by {_after(LINK_ORDERS, self.link_order)}  q quit"
        head: list[Line] = [
            (Span(f"pipemorph top  {self.title}", "head"), Span(f"  {clock(now, now)} UTC"))
        ]
        foot = [part for note in self.notes for part in fact("!", note, width, "bad")]
        foot = foot[: max(1, height // 3)]
        head += body[:fixed]
        room = max(height - len(head) - len(foot) - 1, 1)
        shown = self._window(body[fixed:], at, room)
        if len(body) - fixed > room and self.opened is not None:
            keys = "up/down scroll  " + keys
        blank: list[Line] = [()] * (room - len(shown))
        return [*head, *shown, *blank, *foot, line(keys, "faint")]

    def _list(self, width: int) -> tuple[list[Line], int | None, int]:
        """Lines, which of those that are no heading is chosen, and how many lines are heading."""
        jobs = ordered(self.jobs, self.order, reverse=self.reverse)
        names = [job.name for job in jobs]
        if self._chosen not in names:
            self._chosen = names[0] if names else None
        slow = sum(_has_slow_link(job) for job in jobs)
        summary = f"{plural(len(jobs), 'job')}, {slow} with slow links, by {self.order}"
        heading = [line(summary + (", reversed" if self.reverse else "")), ()]
        if not jobs:
            return [*heading, line("no PipeMorphJob was found")], None, 2
        rows = jobs_table(
            jobs, self._seen, width=width, bars=self.bars, chosen=self._chosen,
            namespaced=self.namespaced,
        )  # fmt: skip
        return [*heading, *rows], names.index(self._chosen or names[0]), 3

    def _job(
        self, job: ClusterJob | None, now: float, width: int
    ) -> tuple[list[Line], int | None, int]:
        if job is None:
            return [line(f"{self.opened} is not there any more", "bad")], None, 0
        seen = self._seen[job.name]
        lines = job_page(job, seen, now, width=width, bars=self.bars, order=self.link_order)
        return [(), *lines], None, 0

    def _window(self, lines: list[Line], at: int | None, room: int) -> list[Line]:
        """The part that fits: with line ``at``, or from where the user has scrolled to."""
        if at is not None:
            self._top = min(max(self._top, at - room + 1), at)
        self._top = max(0, min(self._top, len(lines) - room))
        return lines[self._top : self._top + room]


def _after(orders: Sequence[str], order: str) -> str:
    return orders[(orders.index(order) + 1) % len(orders)]


def _has_slow_link(job: ClusterJob) -> bool:
    training = job.status.training if job.status is not None else None
    return training is not None and training.slow_link_count > 0
