"""Text of a job's explanation, and formats that reports and status share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipemorph.errors import one_line
from pipemorph.planning.ir import join_dashed
from pipemorph.terminal import Table, make_table

MOST_LINES = 10
"""Most lines of an explanation."""
MOST_OBSERVATIONS, MOST_DECISIONS, MOST_ADVICE = 3, 2, 2
"""Most lines of each part; the outcome and the worth have one line each."""
MOST_STAGES = 8
"""Most stages whose warm-ups are listed."""
LEAST_SHOWN_SHARE = 0.01
"""Share of the time from which a cause of idle time is shown."""
MOST_LINE_CHARACTERS = 240
"""Most characters of a line."""


@dataclass
class Explanation:
    """Explanation by parts. Each entry has one sentence or a few; the most important first."""

    outcome: str
    idle: str = ""
    observations: list[str] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    savings: str = ""
    advice: list[str] = field(default_factory=list)
    adapting: list[str] = field(default_factory=list)
    """The one change that lets PipeMorph act on an observed job, and what it would give."""

    def label_rows(self) -> list[tuple[str, str]]:
        """Lines, at most :data:`MOST_LINES`; the first of each part has the part's label."""
        seen = self.observations or ["no slow link, stage or port was found"]
        decided = self.decisions or [
            f"nothing {'was' if self.observations else 'had to be'} changed"
        ]
        advice = self.advice or ["nothing has to be done"]
        parts = [
            ("outcome", [self.outcome]),
            ("idle", [self.idle] if self.idle else []),
            ("seen", _limit_texts(seen, MOST_OBSERVATIONS)),
            ("done", _limit_texts(decided, MOST_DECISIONS)),
            ("worth", [self.savings] if self.savings else []),
            ("to do", advice[:MOST_ADVICE]),
            ("to adapt", self.adapting),
        ]
        return [
            (label if not i else "", one_line(text, MOST_LINE_CHARACTERS))
            for label, texts in parts
            for i, text in enumerate(texts)
        ]

    def to_table(self) -> Table:
        """Table of the rows, in which long lines wrap."""
        return make_table(("", ""), self.label_rows())


def _limit_texts(texts: Sequence[str], most: int) -> list[str]:
    if len(texts) <= most:
        return list(texts)
    more = f" (and {len(texts) - most} more)"
    return [*texts[: most - 1], one_line(texts[most - 1], MOST_LINE_CHARACTERS - len(more)) + more]


def format_link(link: int, column: str = "") -> str:
    """Format as ``link 2 (stage 2 to 3)``. ``column``: of the mesh, empty if it is the only one."""
    return f"link {link} (stage {link} to {link + 1}{', ' if column else ''}{column})"


def format_idle_time(idle: Mapping[str, float], seconds: float) -> str:
    """Format as ``31% of the ranks' time: bubble 18%, link 9%, data 3%, smaller ones 1%``,
    with causes from :data:`LEAST_SHOWN_SHARE` on. ``idle``: seconds by cause, of ``seconds``."""
    shares = {cause: each / seconds for cause, each in idle.items()}
    named = sorted(shares, key=lambda cause: -shares[cause])
    causes = [f"{each} {shares[each]:.0%}" for each in named if shares[each] >= LEAST_SHOWN_SHARE]
    rest = sum(each for each in shares.values() if each < LEAST_SHOWN_SHARE)
    if causes and rest >= 0.005:
        causes.append(f"smaller ones {rest:.0%}")
    text = f"{max(0.0, sum(shares.values())):.0%} of the ranks' time"
    return f"{text}: {', '.join(causes)}" if causes else text


def join_few(texts: Iterable[str], most: int) -> str:
    """Join at most ``most`` texts: ``1, 4, 5 and 2 more``."""
    found = list(texts)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{', '.join(found[:most])}{more}"


def format_count(count: int, what: str, several: str = "") -> str:
    """Format as ``1 iteration``, ``3 iterations``. ``several``: plural, if not ``what`` + s."""
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"


def format_duration(seconds: float) -> str:
    """Format as ``4.2 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 days 4 h``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part, small in ((86400, "day", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            first, rest = divmod(whole, size)
            name = f"{unit}{'s' if unit == 'day' and first > 1 else ''}"
            return f"{first} {name}" + (f" {rest // part} {small}" if rest // part else "")
    return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")


def format_short_duration(seconds: float) -> str:
    """Format as ``4s``, ``3m5s``, ``2h10m``, ``3d4h``: for columns, as kubectl writes ages."""
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


def format_percent_done(done: float) -> str:
    """Format a fraction as ``43%``, rounded down, so that 100% means all."""
    return f"{int(100 * min(max(done, 0.0), 1.0) + 1e-9)}%"


def estimate_seconds_remaining(iterations: int, iteration: int, each: float | None) -> float | None:
    """Seconds until the last iteration ends, if each takes ``each`` seconds; None if that is
    unknown, or all are done."""
    remaining = iterations - iteration
    return remaining * each if each and remaining > 0 else None


def format_plan_effect(
    before: float | None, after: float | None, promised: float | None, measured: float | None
) -> str:
    """Effect of a plan change on the seconds per iteration; empty if not measured."""
    if before is None or after is None:
        return ""
    text = f"{before:.3g} s became {after:.3g} s per iteration"
    if promised is not None and measured is not None:
        text += f" ({promised:.0%} promised, {measured:.0%} measured)"
    return text


def format_warmup_change(before: Sequence[int], after: Sequence[int]) -> str:
    """Format as ``warm-up 7-5-3-1 became 12-11-9-1``; for many stages, the number that changed.
    Empty if none did."""
    if list(before) == list(after):
        return ""
    if len(after) <= MOST_STAGES:
        return f"warm-up {join_dashed(before)} became {join_dashed(after)}"
    changed = sum(a != b for a, b in zip(before, after, strict=False))
    return f"warm-up of {format_count(changed, 'stage')} changed"


def convert_to_hours(
    seconds: float, ranks: int, gpus: int = 0
) -> tuple[float, Literal["GPU", "rank"]]:
    """Seconds of a whole job as hours of all its GPUs, or of its ranks if it has no known GPUs."""
    return seconds * (gpus or ranks) / 3600, "GPU" if gpus else "rank"


def format_hours(hours: float) -> str:
    """Format as ``1,234``, ``12.3``, ``0.14``, ``0.003``; never rounds to 0."""
    if hours and hours < 0.0005:
        return "less than 0.001"
    for least, places in ((100, 0), (1, 1), (0.1, 2)):
        if hours >= least:
            return f"{hours:,.{places}f}"
    return f"{hours:.3f}".rstrip("0").rstrip(".")


def describe_savings(seconds: float, error: float, ranks: int, changes: int, gpus: int = 0) -> str:
    """Sentence about the time that ``changes`` plan changes have saved; empty if there were none.
    ``gpus``: of the job, 0 if none are known."""
    if not changes:
        return ""
    if abs(seconds) < 0.05:
        return "no time was saved or lost by the plan changes"
    verb = "saved" if seconds > 0 else "cost"
    hours, unit = convert_to_hours(abs(seconds), ranks, gpus)
    return (
        f"the plan changes {verb} {format_duration(abs(seconds))} (± {format_duration(error)}),"
        f" {format_hours(hours)} {unit}-hours, against the initial plan"
    )
