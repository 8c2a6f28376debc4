"""Records the README's example as an animated SVG: ``python docs/recording.py`` (a minute).

Runs the commands as a reader would, and plays what they print, at a quarter of the time that it
took. Without animations, as with ``prefers-reduced-motion``, it shows the last lines.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 112, 16
WIDTH, ROW, TOP = 860, 17, 12
SPEED, PAUSE = 4.0, 5.0
"""Times faster than real, and seconds for which the end stays."""
STYLE = (
    "text{{font:12px monospace;fill:#1f2328;white-space:pre}}rect{{fill:#f6f8fa}}"
    ".c{{font-weight:bold}}.p{{fill:#1a5fb4}}"
    "@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}rect{{fill:#161b22}}.p{{fill:#79b8ff}}}}"
    "#l{{transform:translateY({end}px)}}"
    "@media(prefers-reduced-motion:no-preference){{#l{{animation:s {seconds}s step-end infinite}}}}"
    "@keyframes s{{{frames}}}"
)


class PrintedLine(NamedTuple):
    """Line of a terminal, and the second at which it appeared."""

    at: float
    text: str


def record(commands: Sequence[str], folder: str) -> Iterator[PrintedLine]:
    """Run ``pipemorph`` commands, whose folder ``OUT`` is ``folder``, and yield what they print."""
    start = time.monotonic()
    for command in commands:
        yield PrintedLine(time.monotonic() - start, f"$ pipemorph {command}")
        words = command.replace("OUT", folder).split()
        done = subprocess.Popen(
            [sys.executable, "-m", "pipemorph.cli", *words],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.stdout is not None
        for line in done.stdout:
            text = line.rstrip().replace(folder, "OUT")
            yield PrintedLine(time.monotonic() - start, text[:COLUMNS])
        if done.wait():
            raise SystemExit(f"recording: pipemorph {command} exited {done.returncode}")


def draw_recording(lines: Sequence[PrintedLine]) -> str:
    """Draw lines that scroll through :data:`ROWS` rows, as SVG."""
    seconds = lines[-1].at / SPEED + PAUSE
    frames, texts = [], []
    for number, line in enumerate(lines):
        # Rows below the newest line are outside of the window.
        offset = (ROWS - 1 - number) * ROW
        frames.append(f"{100 * line.at / SPEED / seconds:.2f}%{{transform:translateY({offset}px)}}")
        kind = "c" if line.text.startswith("$") else "p" if line.text.startswith("plan") else ""
        texts.append(
            f'<text x="10" y="{(number + 1) * ROW - 4}" class="{kind}">{escape(line.text)}</text>'
        )
    height = 2 * TOP + ROWS * ROW
    end = (ROWS - len(lines)) * ROW
    style = STYLE.format(end=end, seconds=f"{seconds:.1f}", frames="".join(frames))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f"<style>{style}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="6"/>',
            f'<svg y="{TOP}" height="{ROWS * ROW}"><g id="l">',
            *texts,
            "</g></svg></svg>\n",
        ]
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        commands = ("run examples/gpt-slow-link.yaml --out OUT", "explain OUT")
        text = draw_recording(list(record(commands, out)))
    (ROOT / "docs/recording.svg").write_text(text)


if __name__ == "__main__":
    main()
