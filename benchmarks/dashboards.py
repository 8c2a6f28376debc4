"""Draws what the chart's dashboards show of an hour, to look at: Grafana itself does not run here.

One command: ``python benchmarks/dashboards.py --out DIR``, on a machine with Prometheus (or Debian,
whose package it takes) and helm. The metrics are those that the operator, the ingest and the ranks
of this release export, in an hour that is played: eight stages in two replicas, of which a link
turns slow, is left to the engine and recovers, one is not heard of for a while, one turns narrow, a
port fails and another is congested, a stage and a gradient reduction are slow, and the ranks start
again; and thirty jobs beside it. A real Prometheus answers every query of every panel, and a
picture per dashboard is drawn from that, by matplotlib in place of Grafana: units, legends and the
number of series are those of the dashboard, the looks are not. A query that finds nothing, a panel
with many series and a state of links that is never shown are printed; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from prometheus_client import REGISTRY, CollectorRegistry

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]
from testbed import prometheus  # noqa: E402

from pipemorph.api.status import AdaptationSummary, TrainingStatus  # noqa: E402
from pipemorph.api.status_links import FallenLink, RailsStatus, SickPort, SlowLink  # noqa: E402
from pipemorph.control import Health, LinkHealth  # noqa: E402
from pipemorph.planning import Op, OpKind, Route, Schedule  # noqa: E402
from pipemorph.wire import LinkSample, RailSample, StageProfile, TransportSample, WireTime  # noqa: E402
from pipemorph_operator import metrics  # noqa: E402
from pipemorph_operator.ingest import figures  # noqa: E402
from pipemorph_trainer.agent.messages import RankTelemetry  # noqa: E402
from pipemorph_trainer.agent.rank_plan import RankPlan, RankStage  # noqa: E402
from pipemorph_trainer.telemetry.metrics import RankMetrics  # noqa: E402

CHART = ROOT / "charts" / "pipemorph-operator"
JOB = ("team", "gpt")
STAGES, REPLICAS, OTHERS = 8, 2, 30
HOUR, STEP = 3600, 15
# Seconds into the hour.
UNKNOWN, HEARD = 300, 600
SLOW, ADAPTED, WELL, RETURNED = 900, 945, 2400, 2520
SICK, FAILED = 1500, 3000
NARROW, WIDE = 2640, 2940
STRAGGLES, EVEN = 3200, 3400
SLOW_LINK, SILENT_LINK, NARROW_LINK, SICK_STAGE = 2, 0, 4, 5
NARROW_DELAY, NARROW_TRANSFER = 0.035, 0.03
MANY = 24
"""Series in one panel that nobody can tell apart."""
COLUMNS, ROW_INCHES = 24, 0.42

Samples = dict[str, tuple[str, list[str]]]
"""By family: its type, and lines of OpenMetrics."""


# --- the hour that is played ---------------------------------------------------------------------


def training(t: int) -> TrainingStatus:
    """The job's figures, ``t`` seconds into the hour."""
    late, adapted, narrow = SLOW <= t < WELL, ADAPTED <= t < RETURNED, NARROW <= t < WIDE
    seconds = 0.74 + (0.36 if late and not adapted else 0.08 if late else 0.03 if adapted else 0)
    seconds += 0.12 * narrow
    version = 2 if t >= RETURNED else 1 if t >= ADAPTED else 0
    saved = 0.31 * max(0, min(t, WELL) - ADAPTED)
    change = AdaptationSummary(
        plan_version=max(version, 1), kind="return" if version == 2 else "adapt", reason="",
        detected_at="2026-01-01T00:00:00Z", detected_at_iteration=3, promised=0.3,
        measured=0.28 if t > ADAPTED + 30 else None,
    )  # fmt: skip
    slow = [
        SlowLink(
            link=link.link, replica=link.replica, direction="forward",
            delay_ms=1e3 * link.delay, wire_time_ms=1e3 * link.wire_time, confidence=1,
        )
        for link in links_of(t) if link.health is Health.SLOW
    ]  # fmt: skip
    failed = SICK <= t < SICK + 600
    fallen = FallenLink(link=SICK_STAGE, direction="forward", agreed="rdma", transport="tcp")
    sick = SickPort(
        stage=SICK_STAGE, replica=0, device="mlx5_0", port=1, state="DOWN", message="is DOWN"
    )
    return TrainingStatus(
        iteration=int(t / 0.8),
        iteration_seconds=seconds * (1 + 0.01 * math.sin(t / 40)),
        bubble_fraction=0.14 + 0.25 * (late and not adapted) + 0.04 * adapted,
        slow_link_count=len(slow),
        slow_links=slow,
        unknown_link_count=int(UNKNOWN <= t < HEARD),
        slow_reduction_count=int(STRAGGLES <= t < EVEN),
        slow_stage_count=int(STRAGGLES <= t < EVEN),
        routes=[
            "delegated" if adapted and i == SLOW_LINK else "direct" for i in range(STAGES - 1)
        ],
        peak_memory=[(20 + i) << 30 for i in range(STAGES)],
        wanted_plan_version=2 if t >= RETURNED - STEP else 1 if t >= ADAPTED - STEP else 0,
        applied_plan_version=version,
        adaptations=version,
        saved_seconds=saved,
        saved_error_seconds=0.15 * saved,
        last_adaptation=change if version else None,
        rails=RailsStatus(
            ports=16, sick_count=int(failed), sick_ports=[sick] if failed else [],
            congested_count=int(late),
        ),
        fallen_link_count=int(failed),
        fallen_links=[fallen] if failed else [],
    )  # fmt: skip


def links_of(t: int) -> list[LinkHealth]:
    """The job's links, as the controller sees them."""
    states = [LinkHealth(i, Health.HEALTHY, wire_time=0.002) for i in range(STAGES - 1)]
    if UNKNOWN <= t < HEARD:
        states[SILENT_LINK] = LinkHealth(SILENT_LINK, Health.UNKNOWN)
    if SLOW <= t < WELL:
        late = 0.06 + 0.004 * math.sin(t / 60)
        states[SLOW_LINK] = LinkHealth(
            SLOW_LINK, Health.SLOW, delay=late, wire_time=0.002 + late, replica=1
        )
    if NARROW <= t < WIDE:
        states[NARROW_LINK] = LinkHealth(
            NARROW_LINK, Health.SLOW, delay=NARROW_DELAY, wire_time=0.002 + NARROW_DELAY,
            transfer=NARROW_TRANSFER,
        )  # fmt: skip
    return states


def other(number: int, t: int) -> TrainingStatus:
    """The figures of another job: some have a slow link now and then."""
    late = number % 5 == 0 and math.sin(t / 500 + number) > 0.4
    slow = SlowLink(
        link=1, replica=0, direction="forward", delay_ms=20.0 + number, wire_time_ms=50,
        confidence=1,
    )  # fmt: skip
    return TrainingStatus(
        iteration=t, iteration_seconds=0.5 + number / 10, bubble_fraction=0.15,
        slow_link_count=int(late), slow_links=[slow] if late else [],
        saved_seconds=0.02 * t * (number % 5 == 0), adaptations=1,
    )  # fmt: skip


def rank_metrics(rank: int) -> RankMetrics:
    stage = rank % STAGES
    made = RankMetrics(JOB[1], stage, rank // STAGES)
    order = [tuple(Op(kind, i) for i in range(24) for kind in (OpKind.F, OpKind.B, OpKind.W))]
    ops = Schedule(24, tuple(order)).encode()[0]
    held = RankStage(stage=stage, ops=ops, warmup=1)
    made.plan(RankPlan(version=0, digest="0" * 8, microbatches=24, stage_count=STAGES,
                       stages=(held,)))  # fmt: skip
    return made


def hear(found: RankMetrics, rank: int, t: int) -> None:
    """What a rank tells its agent."""
    stage, replica = rank % STAGES, rank // STAGES
    adapted = ADAPTED <= t < RETURNED
    fallen = t >= SICK and stage == SICK_STAGE
    links, ends = [], []
    if stage < STAGES - 1 and not (stage == SILENT_LINK and UNKNOWN <= t < HEARD):
        state = links_of(t)[stage]
        wire = state.wire_time if state.replica == replica else 0.002
        wire *= 1 + 0.05 * math.sin(t / 30 + rank)
        route = Route.DELEGATED if adapted and stage == SLOW_LINK else Route.DIRECT
        times = dict.fromkeys(("min", "p50", "p99", "mean"), wire)
        links.append(LinkSample(
            link=stage, direction="forward", route=route, transport="gloo", iteration=t,
            bytes=24 << 20, wire=WireTime(count=24, exact=24, **times), queue_p50=0.001,
            replica=replica,
        ))  # fmt: skip
        back = fallen and t >= SICK + 600
        ends.append(TransportSample(
            link=stage, direction="forward", agreed="rdma",
            transport="tcp" if fallen and not back else "rdma", fallbacks=int(fallen),
            failbacks=int(back), reconnects=0, replica=replica,
        ))  # fmt: skip
    errors = max(0, t - SICK) // 20 if stage == SICK_STAGE else 0
    rail = RailSample(
        stage=stage, device="mlx5_0", port=1, state="ACTIVE", replica=replica,
        counters={"out_of_sequence": errors, "np_cnp_sent": t * (1 + stage % 3)},
    )  # fmt: skip
    profile = StageProfile(
        stage=stage, forward=0.01, backward_input=0.01, backward_weight=0.005, split="emulated",
        peak_memory=(20 + stage) << 30, replica=replica,
    )  # fmt: skip
    version = 2 if t >= RETURNED else 1 if t >= ADAPTED else 0
    found.hear(RankTelemetry(
        rank=rank, stage=stage, replica=replica, state="training", iteration=int(t / 0.8),
        applied_plan_version=version, prepared_plan_version=version, profile=profile, links=links,
        transports=ends, ports=1, rails=[rail],
    ))  # fmt: skip


def work(t: int) -> None:
    """Of the operator and the ingest, since the moment before."""
    for what, counter in metrics.JOBS.items():
        counter.labels(job_namespace="team").inc(int(t % 600 == 0 and what != "failed"))
    metrics.API_REQUESTS.labels("GET", "200").inc(12)
    metrics.API_REQUESTS.labels("PATCH", "200").inc(30)
    metrics.API_REQUESTS.labels("PATCH", "409").inc(int(t % 300 == 0))
    for kind in ("PipeMorphJob", "Job", "Pod"):
        metrics.WATCH_CONFIRMED.labels(kind, "").set(t - t % 60)
    for _ in range(20):
        metrics.RECONCILES.labels("done").observe(0.012)
        metrics.REPORT_SECONDS.observe(0.0015)
    metrics.RECONCILES.labels("requeued").observe(0.04)
    metrics.REPORTS.labels("report", "200").inc(15 * (OTHERS + 1))
    metrics.REPORTS.labels("report", "421").inc(int(t % 900 < 30))
    metrics.REFUSED.labels("silent").inc(int(t % 1200 == 0))
    metrics.VIEWERS_REFUSED.labels("token").inc(int(t % 900 == 0))
    for size, seconds in (("small", 0.05), ("large", 1.1)):
        metrics.PLAN_SECONDS.labels(size, "yes").observe(seconds)
        metrics.PLAN_WAIT_SECONDS.labels(size, "yes").observe(0.01)
    metrics.DECISIONS.labels("planned").inc(2)
    metrics.DECISIONS.labels("shared").inc(1)
    metrics.STATUS_WRITES.labels("written").inc(20)
    metrics.OVER_BUDGET.labels("team").inc(int(t % 1500 == 0))
    metrics.MEMBERS.set(2)
    metrics.NODE_ACCUSING_JOBS.labels("n7").set(2)
    for gauge in metrics.LEADS.values():
        gauge.set(1)


def played(began: float) -> Samples:
    """All that is exported in the hour."""
    ranks = [rank_metrics(rank) for rank in range(STAGES * REPLICAS)]
    found: Samples = {}
    for t in range(0, HOUR + 1, STEP):
        now = began + t
        work(t)
        for kind in ("PipeMorphJob", "Job", "Pod"):
            metrics.WATCH_CONFIRMED.labels(kind, "").set(now - t % 60)
        goodput = 0.9 - 0.05 * (t >= FAILED)
        figures.show(JOB, training(t), [], now - t % 5, recoveries=int(t >= FAILED),
                     goodput=goodput, links=links_of(t))  # fmt: skip
        for number in range(OTHERS):
            figures.show(("team", f"job-{number}"), other(number, t), [], now, recoveries=0,
                         goodput=0.9)  # fmt: skip
        take(found, REGISTRY, now, {"pod": "ingest-0"})
        for rank, each in enumerate(ranks):
            hear(each, rank, t)
            take(found, each.registry, now, {"namespace": JOB[0], "pod": f"gpt-{rank}"})
    return found


def take(found: Samples, registry: CollectorRegistry, now: float, more: Mapping[str, str]) -> None:
    """What a registry exports now."""
    for family in registry.collect():
        if not family.name.startswith("pipemorph_"):
            continue
        _, lines = found.setdefault(family.name, (family.type, []))
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(f'{k}="{v}"' for k, v in (dict(more) | sample.labels).items())
            lines.append(f"{sample.name}{{{labels}}} {sample.value} {now:.3f}")


# --- what Prometheus makes of it ------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A context manager: a Prometheus that has the samples."""

    def __init__(self, folder: Path, samples: Samples) -> None:
        text = folder / "hour.txt"
        with text.open("w") as file:
            for name, (kind, lines) in samples.items():
                file.write(f"# TYPE {name} {kind}\n" + "".join(f"{each}\n" for each in lines))
            file.write("# EOF\n")
        data = folder / "data"
        subprocess.run(
            [str(prometheus.find("promtool")), "tsdb", "create-blocks-from", "openmetrics",
             str(text), str(data)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (folder / "prometheus.yml").write_text("{}")
        self._port = free_port()
        self._command = [
            str(prometheus.find("prometheus")), f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={data}", f"--web.listen-address=127.0.0.1:{self._port}",
        ]  # fmt: skip

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                self._get("query", query="1")
            except OSError:
                time.sleep(0.2)
            else:
                return self
        raise RuntimeError("Prometheus did not answer within 60 s")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def series(self, expression: str, end: float) -> list[dict[str, Any]]:
        return self._get(
            "query_range", query=expression, start=f"{end - HOUR:.0f}", end=f"{end:.0f}", step="15"
        )

    def now(self, expression: str, end: float) -> list[dict[str, Any]]:
        return self._get("query", query=expression, time=f"{end:.0f}")

    def _get(self, what: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]["result"]


# --- pictures -------------------------------------------------------------------------------------


def scaled(unit: str) -> Callable[[float], str]:
    """How a value of one of Grafana's units reads."""

    def seconds(value: float) -> str:
        for size, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:g} s"

    def bytes_(value: float) -> str:
        for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:g} B"

    return {
        "s": seconds, "bytes": bytes_, "Bps": lambda v: f"{bytes_(v)}/s",
        "percentunit": lambda v: f"{100 * v:.3g}%", "reqps": lambda v: f"{v:.3g}/s",
        "ops": lambda v: f"{v:.3g}/s",
    }.get(unit, lambda v: f"{v:.4g}")  # fmt: skip


def legend(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    text = str(target.get("legendFormat") or "")
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text or ", ".join(f"{k}={v}" for k, v in labels.items() if k != "__name__")


def draw(board: Mapping[str, Any], server: Server, end: float, path: Path) -> list[str]:
    """Draw a dashboard; what is wrong with its panels."""
    wrong = []
    mpl.use("agg")
    from matplotlib.figure import Figure

    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
    figure = Figure(figsize=(16, ROW_INCHES * rows))
    for panel in board["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] / COLUMNS, 1 - (place["y"] + place["h"]) / rows
        width, height = place["w"] / COLUMNS, place["h"] / rows
        title = panel.get("title", "")
        if panel["type"] == "row":
            figure.text(x + 0.005, y + height / 3, title, fontsize=12, weight="bold")
            continue
        if panel["type"] == "text":
            continue
        small = panel["type"] == "stat"
        axes = figure.add_axes(
            (x + (0.005 if small else 0.045), y + (0.1 if small else 0.22) * height,
             width - (0.01 if small else 0.055), (0.6 if small else 0.62) * height)
        )  # fmt: skip
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        found = list(answers(panel, server, end))
        wrong += [f"empty: {title}: {each}" for each in unanswered(panel, server, end)]
        count = len(found)
        if not count:
            axes.text(0.5, 0.5, "no data", ha="center", color="gray", transform=axes.transAxes)
        if count > MANY and panel["type"] == "timeseries":
            wrong.append(f"{count} series: {title}")
        if panel["type"] == "state-timeline":
            (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
            shown = {f"{value:g}" for _, _, points in found for _, value in points}
            absent = [told["text"] for key, told in mapping["options"].items() if key not in shown]
            wrong += [f"never {each}: {title}" for each in absent]
        KINDS[panel["type"]](axes, panel, found, end)
    figure.savefig(path, dpi=70)
    return wrong


Answer = tuple[str, dict[str, str], list[tuple[float, float]]]
"""Legend, labels, and points."""


def answers(panel: Mapping[str, Any], server: Server, end: float) -> Iterator[Answer]:
    for target in panel["targets"]:
        asked = target["expr"].replace("$namespace", JOB[0]).replace("$name", JOB[1])
        if panel["type"] in ("stat", "table"):
            rows = [each | {"values": [each["value"]]} for each in server.now(asked, end)]
        else:
            rows = server.series(asked, end)
        for row in rows:
            points = [(float(at), float(value)) for at, value in row["values"]]
            yield legend(target, row["metric"]), row["metric"], points


def unanswered(panel: Mapping[str, Any], server: Server, end: float) -> Iterator[str]:
    """Queries that find nothing at any time of the hour."""
    for target in panel["targets"]:
        asked = target["expr"].replace("$namespace", JOB[0]).replace("$name", JOB[1])
        if not server.series(asked, end):
            yield asked


def unit(panel: Mapping[str, Any]) -> Callable[[float], str]:
    return scaled(panel["fieldConfig"]["defaults"].get("unit", "short"))


def axis(told: Callable[[float], str]) -> Callable[[float, int], str]:
    """As matplotlib calls it."""
    return lambda value, position: told(value)


def stat(axes: Any, panel: Mapping[str, Any], found: list[Answer], end: float) -> None:
    axes.set_axis_off()
    if found:
        told = unit(panel)(found[0][2][-1][1])
        axes.text(0.02, 0.4, told, fontsize=18, va="center", transform=axes.transAxes)


def lines(axes: Any, panel: Mapping[str, Any], found: list[Answer], end: float) -> None:
    # Grafana has another axis for what the panel says is on the right, with a unit of its own.
    right = {
        each["matcher"]["options"]: {p["id"]: p["value"] for p in each["properties"]}
        for each in panel["fieldConfig"]["overrides"]
        if any(p["id"] == "custom.axisPlacement" for p in each["properties"])
    }
    other = axes.twinx() if right else axes
    for number, (name, _, points) in enumerate(found):
        (other if name in right else axes).plot(
            [(at - end) / 60 for at, _ in points], [v for _, v in points], label=name, lw=1.2,
            color=f"C{number % 10}",
        )  # fmt: skip
    for given in right.values():
        other.yaxis.set_major_formatter(axis(scaled(given.get("unit", "short"))))
        other.set_ylim(bottom=0)
        other.tick_params(labelsize=7)
    axes.set_xlim(-HOUR / 60, 0)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.yaxis.set_major_formatter(axis(unit(panel)))
    axes.grid(alpha=0.3)
    if found:
        shown = axes.get_legend_handles_labels()
        if right:
            more = other.get_legend_handles_labels()
            shown = tuple(a + b for a, b in zip(shown, more, strict=True))
        axes.legend(*(each[:8] for each in shown), fontsize=6, ncols=4, loc="upper left",
                    bbox_to_anchor=(0, -0.12), frameon=False)  # fmt: skip


def colour(name: str) -> str:
    """Of matplotlib, for one of Grafana's."""
    return name.rsplit("-", maxsplit=1)[-1]


def lanes(axes: Any, panel: Mapping[str, Any], found: list[Answer], end: float) -> None:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    for row, (_, _, points) in enumerate(found):
        for at, value in points:
            told = mapping["options"].get(f"{value:g}", {})
            axes.barh(row, STEP / 60, left=(at - end) / 60, color=colour(told.get("color", "gray")))
    axes.set_yticks(range(len(found)), [name for name, _, _ in found])
    axes.set_xlim(-HOUR / 60, 0)
    told = ", ".join(f"{each['text']}: {each['color']}" for each in mapping["options"].values())
    axes.set_xlabel(told, fontsize=6)


def table(axes: Any, panel: Mapping[str, Any], found: list[Answer], end: float) -> None:
    axes.set_axis_off()
    told = unit(panel)
    for row, (_, labels, points) in enumerate(found[:8]):
        cells = "   ".join(f"{k}={v}" for k, v in labels.items())
        axes.text(0, 0.95 - 0.12 * row, f"{cells}   {told(points[-1][1])}", fontsize=8,
                  transform=axes.transAxes)  # fmt: skip


KINDS: Mapping[str, Callable[[Any, Mapping[str, Any], list[Answer], float], None]] = {
    "stat": stat, "timeseries": lines, "state-timeline": lanes, "table": table,
}  # fmt: skip


def boards(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        yield name, json.loads((CHART / "files" / f"dashboard-{name}.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end, wrong = time.time() // 60 * 60, []
    with tempfile.TemporaryDirectory(prefix="pipemorph-bench-") as folder:
        samples = played(end - HOUR)
        with Server(Path(folder), samples) as server:
            for name, board in boards(("job", "platform")):
                wrong += draw(board, server, end, args.out / f"dashboard-{name}.png")
                print(f"drawn: {args.out}/dashboard-{name}.png")
    for each in wrong:
        print(each)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
