"""Points in time, in words."""

from __future__ import annotations

from datetime import UTC, datetime

from pipemorph.explain.story import duration

DAY = 86400


def wall(timestamp: str | None) -> float | None:
    """Seconds since the Unix epoch of an RFC 3339 text; None if it is none."""
    try:
        return datetime.fromisoformat(timestamp).timestamp() if timestamp else None
    except ValueError:
        return None


def clock(at: float, now: float) -> str:
    """``03:04:05``, with the date if it is more than a day ago. UTC."""
    form = "%H:%M:%S" if now - at < DAY else "%Y-%m-%d %H:%M"
    return datetime.fromtimestamp(at, UTC).strftime(form)


def since(at: float | None, now: float, zone: str = "", after: str = "") -> str:
    """``03:04:05 (2 min 10 s)``; ``?`` if unknown. ``zone``: after the time of day; ``after``:
    after the time that has passed."""
    if at is None:
        return "?"
    passed = duration(max(0.0, round(now - at))).replace(".0 s", " s")
    return f"{clock(at, now)}{zone} ({passed}{after})"
