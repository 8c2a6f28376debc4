"""Renders what a check of the fabric measured as one self-contained HTML file, without scripts."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from pipemorph.fabric.check.measure import Checked
from pipemorph.fabric.check.report import QUANTITIES, cells, headline, lines
from pipemorph.fabric.check.verdict import Finding, Measured, Port

STYLE = """
body { font: 13px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1d2530; margin: 16px 20px; }
h1 { font-size: 17px; margin: 0 0 6px; } h2 { font-size: 13px; margin: 16px 0 4px; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: 2px 9px; border: 1px solid #e5e8ec; white-space: nowrap; }
tr > :first-child { text-align: left; font-weight: normal; }
.sick { background: #f6c7c2; font-weight: 600; } .own { background: #f3f4f6; }
"""


def render_matrix(result: Checked) -> str:
    """The page: findings, and a table of each quantity with a row per port and a column per host.
    A sick cell is red and has its finding as tooltip."""
    sick: dict[tuple[Port, Port | None], list[Finding]] = {}
    for finding in result.findings:
        sick.setdefault((finding.source, finding.target), []).append(finding)
    told = "".join(f"<li>{escape(line)}</li>" for line in lines(result))
    tables = "".join(
        f"<h2>{escape(name)}, from row to column</h2>{_table(result, text, sick)}"
        for name, text in QUANTITIES
    )
    title = escape(headline(result))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>PipeMorph fabric check</title><style>{STYLE}</style></head>"
        f"<body><h1>{title}</h1><ul>{told}</ul>{tables}</body></html>\n"
    )


def _table(
    result: Checked,
    text: Callable[[Measured], str],
    sick: dict[tuple[Port, Port | None], list[Finding]],
) -> str:
    hosts = list(result.rails)
    rows = []
    for port, measured in cells(result).items():
        row = [_cell("th", str(port), sick.get((port, None)))]
        for host in hosts:
            each = measured.get(host)
            if each is None:
                row.append('<td class="own"></td>')
            else:
                row.append(_cell("td", text(each), sick.get((port, each.target))))
        rows.append(f"<tr>{''.join(row)}</tr>")
    head = "".join(f"<th>{escape(host)}</th>" for host in hosts)
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _cell(tag: str, text: str, findings: list[Finding] | None) -> str:
    if not findings:
        return f"<{tag}>{escape(text)}</{tag}>"
    why = escape("; ".join(finding.text for finding in findings))
    return f'<{tag} class="sick" title="{why}">{escape(text)}</{tag}>'
