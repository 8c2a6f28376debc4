"""The benchmark of the closed loop reports if the loop is late, or does not close."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import slow_link

WELL = [0.7] * 8
LAST = 6
"""The slow link."""
BOUND = 0.77
"""Seconds that no schedule is shorter than."""


def record(detected: int, applied: int | None, link: int = LAST) -> dict[str, Any]:
    return {
        "detected_at_iteration": detected,
        "applied_at_iteration": applied,
        "links": [{"link": link}],
    }


def rows(iterations: list[float], *adaptations: dict[str, Any]) -> list[Any]:
    """Rows as measured, and a baseline that is three times as slow."""

    def row(variant: str, times: list[float], records: list[dict[str, Any]]) -> Any:
        settled = {
            text: sorted(times[8 * k + 4 : 8 * k + 8])[1]
            for k, text in enumerate(("0", "30", "60"))
        }
        bound = dict.fromkeys(settled, BOUND)
        return slow_link.Row(variant, settled, settled, bound, records, times)

    return [
        row(slow_link.BASELINE, [*WELL, *[1.5] * 8, *[3.0] * 8], []),
        row(slow_link.OURS, iterations, list(adaptations)),
    ]


def verdicts(found: list[Any]) -> tuple[bool, ...]:
    return tuple(holds for _, holds in slow_link.list_goals(found))


@pytest.mark.parametrize(
    ("second", "adaptation", "expected"),
    [
        # An iteration late: settled times look the same.
        ([*[1.1] * 2, *[0.8] * 6], record(16, 18), (True, True, True, True, False)),
        # Wanted but never in effect, or in effect when the delay is over.
        ([1.1] * 8, record(16, None), (False, False, False, True, False)),
        ([1.1] * 8, record(22, 24), (False, False, False, True, False)),
        # None, though iterations were slow until settled.
        ([*[1.1] * 4, *[0.8] * 4], record(17, 18, link=2), (True, True, True, True, False)),
    ],
)
def test_a_late_plan_or_none_is_a_broken_goal(
    second: list[float],
    adaptation: dict[str, Any],
    expected: tuple[bool, ...],
) -> None:
    times = [*WELL, 1.1, *[0.75] * 7, *second]
    assert verdicts(rows(times, record(8, 9), adaptation)) == expected


def narrow(
    seconds: list[float],
    *,
    applied: int | None = 9,
    said: str = "link 6 is slow by 24 ms one way, narrow: 25 ms per message",
) -> Any:
    """A run in whose second phase the link was narrow; one answer, and one of the phase after."""
    answer = record(8, applied) | {"reason": said}
    after = record(17, 18) | {"reason": "a link recovered"}
    settled = [slow_link.find_phase_seconds(seconds, k) for k in range(3)]
    return slow_link.NarrowLinkRun(
        *settled, bound=0.8, adaptations=[answer, after], iterations=seconds
    )


@pytest.mark.parametrize(
    ("during", "after", "answer", "expected"),
    [
        ([1.1, *[0.83] * 7], [0.7] * 8, {}, (True, True, True, True)),
        ([1.1, *[0.85] * 7], [0.7] * 8, {}, (False, True, True, True)),
        ([1.1, *[0.83] * 7], [0.7] * 8, {"applied": 10}, (True, True, False, True)),
        ([0.83] * 8, [0.7] * 8, {"applied": None}, (True, True, False, True)),
        ([1.1, *[0.83] * 7], [0.7] * 8, {"said": "link 6 is slow"}, (True, True, True, False)),
        ([1.1, *[0.83] * 7], [0.83] * 8, {}, (True, False, True, True)),
    ],
)
def test_goals_of_the_narrow_link(
    during: list[float],
    after: list[float],
    answer: dict[str, Any],
    expected: tuple[bool, ...],
) -> None:
    found = narrow([*WELL, *during, *after], **answer)
    assert tuple(holds for _, holds in slow_link.list_narrow_goals(found)) == expected


def test_check_makes_a_broken_goal_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(iterations: list[float], *arguments: str) -> int:
        """Exit status after runs with these iterations, with goals that do not hold."""
        measured = {row.variant: row for row in rows(iterations, record(8, 9))}
        monkeypatch.setattr(slow_link, "VARIANTS", [v for v in variants if v.name in measured])
        monkeypatch.setattr(slow_link, "run_delays", lambda variant, _: measured[variant.name])
        monkeypatch.setattr(slow_link, "run_narrow", lambda _: result)
        monkeypatch.setattr(sys, "argv", ["slow_link.py", *arguments])
        code: int = slow_link.main()
        return code

    variants = slow_link.VARIANTS
    result = narrow([*WELL, 1.1, *[0.83] * 7, *WELL])
    well, late = [*WELL, 1.1, *[0.75] * 7, *[0.79] * 8], [*WELL, *[1.1] * 8, *[1.9] * 8]
    assert status(well, "--check") == 0
    assert "NO " not in capsys.readouterr().out
    assert status(late) == 0
    assert status(late, "--check") == 1
    shown = capsys.readouterr().out
    assert shown.count("measured once more") == 2
    assert shown.count("\nNO ") == 16, "both figures of both runs are shown"
