"""The explanation of a job as text, and the words that reports and status share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipemorph.errors import one_line
from pipemorph.planning.ir import dashed
from pipemorph.terminal import Table, table

MOST_LINES = 10
"""Most lines of an explanation."""
SEEN, DECIDED, ADVISED = 3, 2, 2
"""Most lines of each part; the outcome and the worth have one each, and one is a part's rest."""
MOST_STAGES = 8
"""Most stages of which each warm-up is told."""
LINE = 240
"""Most characters of a line."""


@dataclass
class Story:
    """An explanation, by parts. Each entry is one sentence or a few; the most important first."""

    outcome: str
    seen: list[str] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)
    worth: str = ""
    advice: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[str, str]]:
        """At most :data:`MOST_LINES` lines, each with the label of its part if it is the first."""
        seen = self.seen or ["no slow link, stage or port was found"]
        decided = self.decided or [f"nothing {'was' if self.seen else 'had to be'} changed"]
        advice = self.advice or ["nothing has to be done"]
        parts = [
            ("outcome", [self.outcome]),
            ("seen", _first(seen, SEEN)),
            ("done", _first(decided, DECIDED)),
            ("worth", [self.worth] if self.worth else []),
            ("to do", advice[:ADVISED]),
        ]
        return [
            (label if not i else "", one_line(text, LINE))
            for label, texts in parts
            for i, text in enumerate(texts)
        ]

    def page(self) -> Table:
        """The rows as a table, in which a long line goes on below itself."""
        return table(("", ""), self.rows())


def _first(texts: Sequence[str], most: int) -> list[str]:
    if len(texts) <= most:
        return list(texts)
    return [*texts[: most - 1], f"{texts[most - 1]} (and {len(texts) - most} more)"]


def link_name(link: int, column: str = "") -> str:
    """``link 2 (stage 2 to 3)``. ``column``: of the mesh, empty if there is one."""
    return f"link {link} (stage {link} to {link + 1}{', ' if column else ''}{column})"


def few(texts: Iterable[str], most: int) -> str:
    """``1, 4, 5 and 2 more``: at most so many of the texts."""
    found = list(texts)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{', '.join(found[:most])}{more}"


def plural(count: int, what: str, several: str = "") -> str:
    """``1 iteration``, ``3 iterations``. ``several``: the plural if it is not ``what`` + s."""
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"


def duration(seconds: float) -> str:
    """``4.2 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 days 4 h``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part, small in ((86400, "day", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            first, rest = divmod(whole, size)
            name = f"{unit}{'s' if unit == 'day' and first > 1 else ''}"
            return f"{first} {name}" + (f" {rest // part} {small}" if rest // part else "")
    return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")


def short_duration(seconds: float) -> str:
    """``4s``, ``3m5s``, ``2h10m``, ``3d4h``: for columns, as kubectl writes ages."""
    whole = round(seconds)
    for size, unit, part, small in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            first, rest = divmod(whole, size)
            return f"{first}{unit}" + (f"{rest // part}{small}" if rest // part else "")
    return f"{whole}s"


def percent_done(done: float) -> str:
    """``43%`` of a fraction. Rounded down, so that 100% is all of it."""
    return f"{int(100 * min(max(done, 0.0), 1.0) + 1e-9)}%"


def seconds_left(iterations: int, iteration: int, each: float | None) -> float | None:
    """Until the last of so many iterations ends, if each takes so long; None if that is not known,
    or all are done."""
    left = iterations - iteration
    return left * each if each and left > 0 else None


def brought(
    before: float | None, after: float | None, promised: float | None, measured: float | None
) -> str:
    """What a change of plan did to the seconds per iteration; empty if it was not measured."""
    if before is None or after is None:
        return ""
    text = f"{before:.3g} s became {after:.3g} s per iteration"
    if promised is not None and measured is not None:
        text += f" ({promised:.0%} promised, {measured:.0%} measured)"
    return text


def warmups(before: Sequence[int], after: Sequence[int]) -> str:
    """``warm-up 7-5-3-1 became 12-11-9-1``; of many stages, in how many it did. Empty if it is the
    same."""
    if list(before) == list(after):
        return ""
    if len(after) <= MOST_STAGES:
        return f"warm-up {dashed(before)} became {dashed(after)}"
    changed = sum(a != b for a, b in zip(before, after, strict=False))
    return f"warm-up of {plural(changed, 'stage')} changed"


def hours_of(seconds: float, ranks: int, gpus: int = 0) -> tuple[float, Literal["GPU", "rank"]]:
    """Seconds of a whole job as hours of its GPUs together, or of its ranks where it is not known
    to have any."""
    return seconds * (gpus or ranks) / 3600, "GPU" if gpus else "rank"


def shown_hours(hours: float) -> str:
    """``1,234``, ``12.3``, ``0.14``, ``0.003``: however few they are, they are told."""
    if hours and hours < 0.0005:
        return "less than 0.001"
    for least, places in ((100, 0), (1, 1), (0.1, 2)):
        if hours >= least:
            return f"{hours:,.{places}f}"
    return f"{hours:.3f}".rstrip("0").rstrip(".")


def worth_line(seconds: float, error: float, ranks: int, changes: int, gpus: int = 0) -> str:
    """What ``changes`` of plan have saved; empty if there were none. ``gpus``: of the job, 0 if it
    is not known to have any."""
    if not changes:
        return ""
    if abs(seconds) < 0.05:
        return "no time was saved or lost by the plan changes"
    verb = "saved" if seconds > 0 else "cost"
    hours, unit = hours_of(abs(seconds), ranks, gpus)
    return (
        f"the plan changes {verb} {duration(abs(seconds))} (± {duration(error)}),"
        f" {shown_hours(hours)} {unit}-hours, against the plan of the start"
    )
