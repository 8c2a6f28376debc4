"""Draws the pages that users have of a job, to look at.

One command: ``python benchmarks/pictures.py --out DIR``. Jobs of 4, 8 and 64 stages that are
healthy, have a slow link, have answered it, have recovered, and have failed. Plans are the
planner's and ops the simulator's, states and times are given. A headless browser
(tests/support/browser.py) draws the live page (light, dark, as wide as a phone), what its button
saves, and the page of a replay, which is a real one. ``DIR/index.html`` shows all of them.
"""

from __future__ import annotations

import argparse
import html
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support")]

from browser import Browser as WebBrowser  # noqa: E402
from watched_jobs import LATE, SLOW_AT, WELL_AT, WIRE, Case, watched  # noqa: E402

from pipemorph.planning import Link, Problem, StageTimes  # noqa: E402
from pipemorph.replay.contenders import Replay, replay  # noqa: E402
from pipemorph.replay.page import render_page as render_replay  # noqa: E402
from pipemorph.replay.trace import LinkTrace, parse_trace  # noqa: E402
from pipemorph.watch.build import StageTrace, Watched, watch_view, worst_column  # noqa: E402
from pipemorph.watch.documents import render_page  # noqa: E402

MICROBATCHES = {4: 12, 8: 24, 64: 128}
CASES: tuple[Case, ...] = ("healthy", "slow", "adapted", "recovered", "failed")
REPLICAS = 64
LOOKS = {"light": (1200, False), "dark": (1200, True), "phone": (390, False)}
LARGE = 32
"""Stages."""
Fate = Literal["healthy", "slow", "recovered", "failed"]


class Drawer:
    """Draws HTML into ``out``. ``made``: the names of the pictures."""

    def __init__(self, browser: WebBrowser, out: Path, scratch: Path) -> None:
        self._browser, self._out, self._scratch = browser, out, scratch
        self.made: list[str] = []

    def page(self, name: str, text: str, looks: Sequence[str] = ("light",)) -> None:
        path = self._scratch / f"{name}.html"
        path.write_text(text)
        for look in looks:
            width, dark = LOOKS[look]
            self._browser.look(path.as_uri(), width=width, dark=dark)
            self._take(name if len(looks) == 1 else f"{name}-{look}")

    def saved(self, name: str, text: str) -> None:
        """What the page's own button makes of it."""
        path = self._scratch / f"{name}.html"
        path.write_text(text)
        self._browser.look(path.as_uri())
        shutil.move(self._browser.download("#png", self._scratch), self._out / f"{name}.png")
        self.made.append(name)

    def _take(self, name: str) -> None:
        self._browser.picture(self._out / f"{name}.png")
        if self._browser.errors:
            raise RuntimeError(f"{name}: {self._browser.errors[0]}")
        self.made.append(name)
        print(name, flush=True)


def replayed(stages: int, microbatches: int, fate: Fate) -> tuple[Replay, LinkTrace]:
    """The job of so many stages, in which a link is slow from an iteration on until another, or
    until it ends, or breaks then. Large jobs have fewer iterations: each takes a while."""
    begin, end, count = (SLOW_AT, WELL_AT, 56) if stages < LARGE else (4, 12, 18)
    link = stages // 2 - 1 if stages > 2 else 0
    times = StageTimes(forward=10.0, backward_input=10.5, backward_weight=5.5)
    links = [Link(delay=1e3 * WIRE)] * (stages - 1)
    problem = Problem(microbatches=microbatches, stages=[times] * stages, links=links)
    slow = {"delay_ms": 1e3 * LATE}
    after = {"recovered": {}, "failed": {str(link): slow | {"down": True}}}
    lines = [{"at_iteration": begin, "links": {str(link): slow}}] if fate != "healthy" else []
    if fate in after:
        lines.append({"at_iteration": end, "links": after[fate]})
    text = "\n".join(json.dumps(each) for each in lines or [{"at_iteration": 0, "links": {}}])
    trace = parse_trace(text, stages - 1, "a trace", replicas=1)
    return replay(problem, trace, iterations=count), trace


def live_page(known: Watched, traces: Sequence[StageTrace]) -> str:
    column = worst_column(known)
    return render_page(watch_view(known, traces, column=column, live=False))


def draw(to: Drawer, stages: int) -> None:
    """All of so many stages."""
    for case in CASES:
        name = f"{stages}-{case}"
        known, traces = watched(stages, MICROBATCHES[stages], case)
        live = live_page(known, traces)
        to.page(f"live-{name}", live, tuple(LOOKS))
        if case == "adapted":
            to.saved(f"saved-{name}", live)
    for fate in get_args(Fate):
        found, trace = replayed(stages, min(64, MICROBATCHES[stages]), fate)
        looks = tuple(LOOKS) if fate == "recovered" else ("light",)
        title = f"{fate}.jsonl, {stages}-stages.yaml"
        to.page(f"replay-{stages}-{fate}", render_replay(found, trace, title), looks)


def index(made: Sequence[str]) -> str:
    pictures = "".join(
        f"<figure><figcaption>{html.escape(name)}</figcaption>"
        f"<img loading=lazy src='{html.escape(name)}.png' style='max-width:100%'></figure>"
        for name in made
    )
    return f"<!doctype html><meta charset=utf-8><title>Pictures</title>{pictures}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--stages", type=int, nargs="*", choices=list(MICROBATCHES), default=list(MICROBATCHES)
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pictures-") as scratch, WebBrowser() as browser:
        to = Drawer(browser, options.out, Path(scratch))
        for stages in options.stages:
            draw(to, stages)
        if 64 in options.stages:
            known, traces = watched(64, 64, "adapted", replicas=REPLICAS)
            to.page(f"live-64x{REPLICAS}-adapted", live_page(known, traces), ("light", "phone"))
        (options.out / "index.html").write_text(index(to.made))
    print(f"{len(to.made)} pictures in {options.out} after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
