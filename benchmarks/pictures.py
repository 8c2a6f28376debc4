"""Renders the pages of a job for review.

One command: ``python benchmarks/pictures.py --out DIR``. The jobs have 4, 8 and 64 stages and are
healthy, have a slow link, have adapted to it, have recovered, or have failed. Plans come from the
planner, ops from the simulator; states and times are given. A headless browser
(tests/support/browser.py) draws the live page (light, dark, as wide as a phone), the file that its
button saves, and the page of a real replay. ``DIR/index.html`` shows all of them.
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
from typing import Any, Literal, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support")]

from browser import Browser as WebBrowser  # noqa: E402
from op_traces import PlayedJob, make_table  # noqa: E402
from watched_jobs import LATE, SLOW_AT, WELL_AT, WIRE, Case, watched  # noqa: E402

from pipemorph.diagnose.diagnosis import diagnose  # noqa: E402
from pipemorph.diagnose.formats.registry import Recording  # noqa: E402
from pipemorph.diagnose.pictures.picture_files import render_picture_files  # noqa: E402
from pipemorph.planning import Link, Policy, Problem, StageTimes, plan, simulate  # noqa: E402
from pipemorph.replay.baselines import ReplayResult, replay_trace  # noqa: E402
from pipemorph.replay.link_trace import LinkTrace, parse_trace  # noqa: E402
from pipemorph.replay.replay_page import render_replay_page as render_replay  # noqa: E402
from pipemorph.views.live_page.document_cache import render_live_page  # noqa: E402
from pipemorph.views.live_page.page_builder import (  # noqa: E402
    StageTrace,
    WatchedJob,
    build_page_document,
    find_slowest_column,
)
from pipemorph.views.pictures import (  # noqa: E402
    Timeline,
    draw_steps,
    render_html,
)

MICROBATCHES = {4: 12, 8: 24, 64: 128}
CASES: tuple[Case, ...] = ("healthy", "slow", "adapted", "recovered", "failed")
REPLICAS = 64
LOOKS = {"light": (1200, False), "dark": (1200, True), "phone": (390, False)}
LARGE = 32
"""Stages."""
Fate = Literal["healthy", "slow", "recovered", "failed"]


class PageDrawer:
    """Draws HTML into ``out``. ``made``: names of the pictures."""

    def __init__(self, browser: WebBrowser, out: Path, scratch: Path) -> None:
        self._browser, self._out, self._scratch = browser, out, scratch
        self.made: list[str] = []

    def draw_page(self, name: str, text: str, looks: Sequence[str] = ("light",)) -> None:
        path = self._scratch / f"{name}.html"
        path.write_text(text)
        for look in looks:
            width, dark = LOOKS[look]
            self._browser.look(path.as_uri(), width=width, dark=dark)
            self._take_picture(name if len(looks) == 1 else f"{name}-{look}")

    def draw_saved_page(self, name: str, text: str) -> None:
        """Save the picture that the page's own button downloads."""
        path = self._scratch / f"{name}.html"
        path.write_text(text)
        self._browser.look(path.as_uri())
        shutil.move(self._browser.download("#png", self._scratch), self._out / f"{name}.png")
        self.made.append(name)

    def add_picture(self, name: str, content: bytes) -> None:
        (self._out / f"{name}.png").write_bytes(content)
        self.made.append(name)

    def _take_picture(self, name: str) -> None:
        self._browser.picture(self._out / f"{name}.png")
        if self._browser.errors:
            raise RuntimeError(f"{name}: {self._browser.errors[0]}")
        self.made.append(name)
        print(name, flush=True)


def replay_job(stages: int, microbatches: int, fate: Fate) -> tuple[ReplayResult, LinkTrace]:
    """Replay of a job whose link turns slow in an iteration, and later recovers, stays slow or
    breaks. Large jobs have fewer iterations, because each takes a while."""
    begin, end, count = (SLOW_AT, WELL_AT, 56) if stages < LARGE else (4, 12, 18)
    link = stages // 2 - 1 if stages > 2 else 0
    times = StageTimes(forward=10.0, backward_input=10.5, backward_weight=5.5)
    links = (Link(delay=1e3 * WIRE),) * (stages - 1)
    problem = Problem(microbatches=microbatches, stages=(times,) * stages, links=links)
    slow = {"delay_ms": 1e3 * LATE}
    after = {"recovered": {}, "failed": {str(link): slow | {"down": True}}}
    lines = [{"at_iteration": begin, "links": {str(link): slow}}] if fate != "healthy" else []
    if fate in after:
        lines.append({"at_iteration": end, "links": after[fate]})
    text = "\n".join(json.dumps(each) for each in lines or [{"at_iteration": 0, "links": {}}])
    trace = parse_trace(text, stages - 1, "a trace", replicas=1)
    return replay_trace(problem, trace, iterations=count), trace


def live_page(known: WatchedJob, traces: Sequence[StageTrace]) -> str:
    column = find_slowest_column(known)
    return render_live_page(build_page_document(known, traces, column=column, live=False))


def draw_plans(to: PageDrawer, stages: int) -> None:
    """Draw the page and the PNG of a plan, and the PNG of three iterations of a run."""
    times = StageTimes(forward=10.0, backward_input=10.5, backward_weight=5.5)
    late = stages // 2 - 1
    delays = [1e3 * LATE if i == late else 0.0 for i in range(stages - 1)]
    quick = Problem(
        microbatches=MICROBATCHES[stages], stages=(times,) * stages, links=(Link(),) * (stages - 1)
    )
    slow = quick.model_copy(update={"links": tuple(Link(delay=each) for each in delays)})
    before, after = plan(quick, Policy.ZERO_BUBBLE), plan(slow)
    drawn = [
        Timeline.from_simulation(simulate(made.schedule, problem), problem, title=title)
        for title, made, problem in (
            ("iteration 11, links healthy, plan v0: 520 ms, idle 11%", before, quick),
            ("iteration 14, link 1 +60 ms, plan v0: 700 ms, idle 30%", before, slow),
            ("iteration 30, link 1 +60 ms, plan v1: 580 ms, idle 15%", after, slow),
        )
    ]
    to.draw_page(f"plan-{stages}", render_html(drawn[2], [("idle", "15%")]), tuple(LOOKS))
    to.add_picture(f"png-{stages}", draw_steps("", drawn[2:]).to_png())
    to.add_picture(f"timeline-{stages}", draw_steps(f"job-of-{stages}", drawn).to_png())


def draw_diagnosis(to: PageDrawer, stages: int) -> None:
    """Draw the page of a diagnosis of a job with a slow worker."""

    def vary(*op: Any) -> float:
        step, replica, stage, _, microbatch, usual = op
        slow = 1.5 if (replica, stage) == (1, 2) and step >= 2 else 1.0
        return float(usual * slow * (0.95 + 0.01 * ((microbatch * 7 + replica + step) % 9)))

    job = PlayedJob(replicas=2, stages=stages, microbatches=MICROBATCHES[stages], seconds=vary)
    found = diagnose(Recording(make_table(job.operations()), "op tables", []))
    page = render_picture_files(found, [Path("job.csv")])["diagnosis.html"]
    to.draw_page(f"diagnosis-{stages}", page, tuple(LOOKS))


def draw_all(to: PageDrawer, stages: int) -> None:
    """Draw all pages of jobs with that number of stages."""
    draw_plans(to, stages)
    draw_diagnosis(to, stages)
    for case in CASES:
        name = f"{stages}-{case}"
        known, traces = watched(stages, MICROBATCHES[stages], case)
        live = live_page(known, traces)
        to.draw_page(f"live-{name}", live, tuple(LOOKS))
        if case == "adapted":
            to.draw_saved_page(f"saved-{name}", live)
    for fate in get_args(Fate):
        found, trace = replay_job(stages, min(64, MICROBATCHES[stages]), fate)
        looks = tuple(LOOKS) if fate == "recovered" else ("light",)
        title = f"{fate}.jsonl, {stages}-stages.yaml"
        to.draw_page(f"replay-{stages}-{fate}", render_replay(found, trace, title), looks)


def write_index(made: Sequence[str]) -> str:
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
        to = PageDrawer(browser, options.out, Path(scratch))
        for stages in options.stages:
            draw_all(to, stages)
        if 64 in options.stages:
            known, traces = watched(64, 64, "adapted", replicas=REPLICAS)
            to.draw_page(
                f"live-64x{REPLICAS}-adapted", live_page(known, traces), ("light", "phone")
            )
        (options.out / "index.html").write_text(write_index(to.made))
    print(f"{len(to.made)} pictures in {options.out} after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
