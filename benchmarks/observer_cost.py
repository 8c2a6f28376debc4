"""What a job's reports cost: the agent that observes its ranks, and the host that decides.

    python benchmarks/observer_cost.py [--only 64x160] [--json FILE]

Ranks are played: each tells its agent a window of every direction of its links each 50 ms, and its
op times once an iteration. Time is virtual, so the figures are processor seconds per second of
training, and bytes. Each job trains until nothing is new, and then healthy for some seconds; then
link 0 turns slow in one column. The agent's figures do not include that it receives and parses the
messages of ranks: what that takes is said below the table.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.control.decide.replan import propose
from pipemorph.control.observe.observer import JobTelemetry, Observer
from pipemorph.planning import Route
from pipemorph.wire import (
    IterationSample,
    LinkHealthReport,
    LinkSample,
    StageProfile,
    WireTime,
)
from pipemorph_trainer.agent.messages import RankTelemetry

WINDOW, ITERATION = 0.05, 0.5
SETTLE, HEALTHY, FAULT = 20.0, 5.0, 5.0
"""Seconds until nothing is new, of which healthy figures are, and of a fault."""
BASE, DELAY, NOISE, OP = 0.002, 0.030, 0.03, 0.01
VARIANTS = 5
SIZES = ((4, 1), (8, 16), (64, 16), (64, 160))


@dataclass
class Cost:
    """Over ``seconds`` of training. ``agent``, ``host``: processor seconds; ``planned``: of
    decisions, which another process makes."""

    seconds: float = 0.0
    reports: int = 0
    bytes: int = 0
    agent: float = 0.0
    host: float = 0.0
    planned: float = 0.0
    most_host: float = 0.0
    """Of one report."""

    def row(self) -> dict[str, float]:
        reports = max(1, self.reports)
        return {
            "reports_per_second": self.reports / self.seconds,
            "bytes_per_second": self.bytes / self.seconds,
            "agent_percent": 100 * self.agent / self.seconds,
            "host_percent": 100 * self.host / self.seconds,
            "host_us_per_report": 1e6 * self.host / reports,
            "longest_host_ms": 1e3 * self.most_host,
        }


@dataclass
class Played:
    """The ranks of a job: samples are made before anything is timed, and told again."""

    stages: int
    columns: int
    windows: dict[bool, list[list[LinkSample]]] = field(default_factory=dict)
    profiles: list[list[StageProfile]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(1)
        for slow in (False, True):
            self.windows[slow] = [
                [
                    self._window(draw, link, column, direction, slow and link == column == 0)
                    for link in range(self.stages - 1)
                    for column in range(self.columns)
                    for direction in ("forward", "backward")
                ]
                for _ in range(VARIANTS)
            ]
        self.profiles = [
            [
                StageProfile(
                    stage=stage, replica=column, split="module", peak_memory=1 << 34,
                    forward=draw.gauss(OP, OP / 100), backward_input=draw.gauss(OP, OP / 100),
                    backward_weight=draw.gauss(OP, OP / 100),
                )
                for stage in range(self.stages)
                for column in range(self.columns)
            ]
            for _ in range(VARIANTS)
        ]  # fmt: skip

    @staticmethod
    def _window(
        draw: random.Random, link: int, column: int, direction: Any, slow: bool
    ) -> LinkSample:
        wire = max(1e-4, draw.gauss(BASE, NOISE * BASE)) + DELAY * slow
        return LinkSample(
            link=link, replica=column, direction=direction, route=Route.DIRECT, transport="gloo",
            iteration=0, bytes=1 << 24, queue_p50=1e-5,
            wire=WireTime(count=5, exact=5, min=wire, p50=wire, p99=wire, mean=wire),
        )  # fmt: skip


class Loop:
    """One job: its ranks, its agent and its host."""

    def __init__(self, stages: int, columns: int) -> None:
        spec = JobSpec.model_validate(
            {
                "parallelism": {"stages": stages, "replicas": columns},
                "schedule": {"microbatches": 2 * stages},
                "trainer": {"module": "x", "iterations": 1_000_000},
            }
        )
        self.ranks = Played(stages, columns)
        self.controller = JobController(spec)
        self.observer = Observer(spec.parallelism.mesh, job="j", namespace="n", attempt=0)
        self.now, self.turn, self.iteration, self.sequence, self.observed = 1.7e9, 0, 0, 0, 0

    def run(self, seconds: float, *, slow: bool = False) -> Cost:
        cost = Cost(seconds=seconds)
        for _ in range(round(seconds / WINDOW)):
            self.now += WINDOW
            self.turn += 1
            ends = self.turn % round(ITERATION / WINDOW) == 0
            self.iteration += ends
            finished = IterationSample(
                index=self.iteration - 1, seconds=ITERATION, loss=1.0,
                plan_version=self.observed, bubble_fraction=0.1,
            ) if ends else None  # fmt: skip
            telemetry = JobTelemetry(
                iteration=self.iteration,
                applied_plan_version=self.observed,
                links=self.ranks.windows[slow][self.turn % VARIANTS],
                stages=self.ranks.profiles[self.iteration % VARIANTS] if ends else (),
                iterations=[finished] if finished else (),
                ports=0,
            )
            with timed(cost, "agent"):
                self.observer.observe(telemetry, self.now)
                due = self.observer.due(self.now)
            if due:
                self._report(cost)
        return cost

    def _report(self, cost: Cost) -> None:
        self.sequence += 1
        with timed(cost, "agent"):
            report = self.observer.report(self.sequence, self.now, self.observed)
            body = report.body()
        before = cost.host
        with timed(cost, "host"):
            answer = self.controller.report(LinkHealthReport.model_validate_json(body), self.now)
        cost.most_host = max(cost.most_host, cost.host - before)
        with timed(cost, "agent"):
            self.observer.delivered(report, answer, self.now)
        cost.reports += 1
        cost.bytes += len(body)
        asked = self.controller.replan
        if asked is not None:
            with timed(cost, "planned"):
                proposal = propose(asked)
            with timed(cost, "host"):
                self.controller.settle(asked, proposal, self.now)
        directive = self.controller.directive(self.observed)
        if directive is not None:
            self.observed = directive.plan_version


@contextmanager
def timed(cost: Cost, part: str) -> Iterator[None]:
    began = time.process_time()
    yield
    setattr(cost, part, getattr(cost, part) + time.process_time() - began)


def parsing(ranks: Played) -> float:
    """Processor seconds to parse one message of a rank between two stages."""
    told = RankTelemetry(
        rank=0, stage=0, replica=0, state="training", iteration=0, applied_plan_version=0,
        prepared_plan_version=0, links=ranks.windows[False][0][:2],
    )  # fmt: skip
    body, count = told.body(), 2000
    began = time.process_time()
    for _ in range(count):
        RankTelemetry.model_validate_json(body)
    return (time.process_time() - began) / count


def measure(stages: int, columns: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    loop = Loop(stages, columns)
    loop.run(SETTLE)
    healthy = loop.run(HEALTHY)
    onset = loop.run(1.0, slow=True)
    fault = loop.run(FAULT, slow=True)
    found: dict[str, Any] = {"stages": stages, "columns": columns}
    for name, cost in (("healthy", healthy), ("onset", onset), ("fault", fault)):
        found[name] = cost.row() | {"raw": asdict(cost)}
        row = cost.row()
        say(
            f"| {stages} × {columns} | {name} | {row['reports_per_second']:.1f} |"
            f" {row['bytes_per_second'] / 1e3:.1f} | {row['agent_percent']:.1f} |"
            f" {row['host_percent']:.2f} | {row['host_us_per_report']:.0f} |"
            f" {row['longest_host_ms']:.1f} |"
        )
    found["parsing_us"] = 1e6 * parsing(loop.ranks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="STAGESxCOLUMNS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("| job | | reports/s | KB/s | agent % | host % | µs per report | longest, ms |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    rows = [measure(*size) for size in SIZES if options.only in (None, "x".join(map(str, size)))]
    print(f"A message of a rank takes {rows[-1]['parsing_us']:.0f} µs to parse.")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
