"""Compared figures as text."""

from __future__ import annotations

from typing import Any

from pipemorph.terminal import RenderableType, make_table

HEADINGS = ("", "published", "here", "difference", "")


def format_comparison(found: dict[str, Any]) -> list[RenderableType]:
    """Tables of the experiments with the reasons of differences; ``found``: the document of
    :func:`~pipemorph.reproduce.comparison.run_experiments`."""
    parts: list[RenderableType] = []
    for experiment in found["experiments"]:
        rows, sentences, last = list[tuple[str, ...]](), dict[str, str](), None
        for row in experiment["rows"]:
            if row["case"] != last:
                last = row["case"]
                rows.append((last, "", "", "", ""))
            rows.append(_format_row(row))
            if reason := row["reason"]:
                sentences[reason["name"]] = reason["sentence"]
        parts += [experiment["title"], experiment["setting"], ""]
        if experiment["failure"]:
            parts += [f"Not run: {experiment['failure']}", ""]
            continue
        parts += [make_table(HEADINGS, rows, right=HEADINGS[1:4]), ""]
        parts += [f"{name}: {sentence}" for name, sentence in sentences.items()]
        parts += [f"{experiment['summary']}. Published: {experiment['source']}.", ""]
    return [*parts, f"In all: {found['summary']}."]


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    published = "–" if row["published"] is None else _format_spread(row, "published")
    difference = "" if row["difference"] is None else f"{100 * row['difference'] + 0:+.1f} %"
    if row["limit"]:
        published, difference = f"≤ {published}", ""
    verdict = "" if row["agrees"] else "no reason found"
    if reason := row["reason"]:
        verdict = f"{reason['name']}: {reason['check']}"
    return f"- {row['way']}", published, _format_spread(row, "measured"), difference, verdict


def _format_spread(row: dict[str, Any], key: str) -> str:
    """Mean of a figure, and its spread if it has one, such as ``834 (799–858) ms``."""
    mean, least, most = (_format_value(row[key][name]) for name in ("mean", "least", "most"))
    unit = row["unit"] if row["unit"] == "×" else f" {row['unit']}"
    return f"{mean}{unit}" if least == most else f"{mean} ({least}–{most}){unit}"


def _format_value(value: float) -> str:
    return (
        f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
    )
