"""Formats a table for a terminal, which is valid Markdown too."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int | None = None) -> str:
    """Rows under ``head``; columns from ``numbers`` on are right-aligned."""
    first_number = len(head) if numbers is None else numbers
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(widths[i]) if i >= first_number else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * (w + 1) + (":" if i >= first_number else "-") for i, w in enumerate(widths)]
    return "\n".join([line(head), "|" + "|".join(rule) + "|", *map(line, rows)])
