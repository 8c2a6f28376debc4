"""The reports that a job's agent sends, made by the agent's own code from what its ranks tell it.

Every rank tells its agent each 50 ms of the windows of its links, and at the end of an iteration
of its op times. The agent observes them and reports once a second, and at once when a link turns
slow. A report is made once per kind by :class:`~pipemorph.control.observe.observer.Observer` and
sent with other numbers, so that a load generator has nearly all of the processor left for what is
measured.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Literal

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.observer import REPORT_SECONDS, Observer
from pipemorph.planning import Route
from pipemorph.wire import (
    DirectiveEnvelope,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    StageProfile,
    TransportSample,
    WireTime,
)
from pipemorph_trainer.agent.merge import TelemetryMerger
from pipemorph_trainer.agent.messages import RankTelemetry

PERIOD = ITERATION = REPORT_SECONDS
"""Seconds between two reports of one agent while its ranks train, unless it is told to report less
often, and of an iteration. Op times differ by too little to be told again."""
Kind = Literal["first", "quiet", "alarm", "slow"]
"""first: tells everything; quiet: nothing but an iteration; alarm: that a link has turned slow;
slow: an iteration while it is."""
NORMAL, SLOW = 0.002, (0.04, 0.12)
"""Wire times, seconds. A slow link's is drawn."""
OP = 0.01
"""Seconds."""
MESSAGES = 5
"""Of one window."""
WINDOW, SETTLED, OPS_EVERY, MOST = 0.05, 60, 4, 80
"""Seconds of a window; so many until nothing is new, in how many of them there are op times, and at
most until an alarm, or until reports tell of progress alone."""

_NAME, _NAMESPACE = "the-name-of-the-job", "the-namespace-of-the-job"
_SEQUENCE, _INDEX, _ITERATION, _VERSION = 900_000_001, 900_000_002, 900_000_003, 900_000_004
_OBSERVED, _SECONDS, _NONE = 900_000_005, 1234.5, '"iterations":[]'
"""What stands in a body for what differs from report to report."""


class Reports:
    """Bodies of the reports of a job of ``stages`` stages. ``seed``: of its op times, of which link
    turns slow, and of how slow."""

    def __init__(self, stages: int, seed: int = 0) -> None:
        self._texts = {kind: _apart(text) for kind, text in _texts(stages, seed).items()}

    def body(
        self,
        namespace: str,
        job: str,
        sequence: int,
        observed: int,
        kind: Kind,
        *,
        applied: int | None = None,
        iteration: int | None = None,
        finished: int = 1,
        seconds: float = ITERATION,
    ) -> str:
        """The report number ``sequence`` of a job. ``observed``: the newest plan version;
        ``applied``: the one in effect, if it is another; ``iteration``: the one in progress
        (default: one a report); ``finished``: how many it tells of, if its kind tells of any;
        ``seconds``: of each."""
        text, sample = self._texts[kind]
        at = sequence % 2**31 + 1 if iteration is None else iteration
        if sample:
            took = str(round(seconds * random.gauss(1, 0.01), 6))
            one = sample.replace(str(_SECONDS), took)
            told = [one.replace(str(_INDEX), str(at - i)) for i in range(finished, 0, -1)]
            text = text.replace(_NONE, f'"iterations":[{",".join(told)}]')
        numbers = {
            _NAMESPACE: namespace, _NAME: job, _SEQUENCE: sequence, _ITERATION: at,
            _OBSERVED: observed, _VERSION: observed if applied is None else applied,
        }  # fmt: skip
        for stands_for, value in numbers.items():
            text = text.replace(str(stands_for), str(value))
        return text


def _apart(text: str) -> tuple[str, str]:
    """A report without the iteration that it tells of, and that; empty if it tells of none."""
    report = json.loads(text)
    compact = json.JSONEncoder(separators=(",", ":")).encode
    if not (samples := report.get("iterations")):
        return text, ""
    return compact(report | {"iterations": []}), compact(samples[0])


def _texts(stages: int, seed: int) -> dict[Kind, str]:
    """A report of each kind."""
    draw = random.Random(f"{stages} {seed}")
    slow_link, slow_time = draw.randrange(stages - 1), draw.uniform(*SLOW)
    merger = TelemetryMerger(range(stages))
    observer = Observer(MeshShape(stages), job=_NAME, namespace=_NAMESPACE, attempt=0)
    now = 1.7e9
    texts: dict[Kind, str] = {}

    def hear(*, slow: bool = False, finished: bool = False) -> None:
        nonlocal now
        now += WINDOW
        times = {slow_link: slow_time} if slow else {}
        for rank in range(stages):
            merger.add(_telemetry(draw, rank, stages, times, finished))
        observer.observe(merger.take(), now, refresh=finished)

    def send(kind: Kind | None = None) -> LinkHealthReport:
        report = observer.report(_SEQUENCE, now, _OBSERVED)
        observer.delivered(report, DirectiveEnvelope(memory="" if kind is None else "it"), now)
        if kind is not None:
            texts[kind] = report.body().decode()
        return report

    send()
    for window in range(SETTLED):
        hear(finished=window % OPS_EVERY == OPS_EVERY - 1)
    send("first")
    for _ in range(MOST):
        hear(finished=True)
        if send("quiet").is_progress:
            break
    else:
        raise RuntimeError(f"{stages} stages, seed {seed}: no report tells of progress alone")
    for _ in range(MOST):
        hear(slow=True)
        if observer.due(now) and send("alarm").directions:
            break
    hear(slow=True, finished=True)
    send("slow")
    return texts


def _telemetry(
    draw: random.Random, rank: int, stages: int, slow: Mapping[int, float], finished: bool
) -> RankTelemetry:
    """What one rank tells. It receives activations on the link before it, and gradients on
    that after it."""
    received = [("forward", rank - 1)] if rank else []
    received += [("backward", rank)] if rank < stages - 1 else []
    links = [_window(draw, link, direction, slow) for direction, link in received]
    sends = [("forward", rank)] if rank < stages - 1 else []
    sends += [("backward", rank - 1)] if rank else []
    ops = {
        name: draw.gauss(OP, OP / 100) for name in ("forward", "backward_input", "backward_weight")
    }
    return RankTelemetry(
        rank=rank,
        stage=rank,
        replica=0,
        state="training",
        iteration=_ITERATION,
        applied_plan_version=_VERSION,
        prepared_plan_version=_VERSION,
        links=links,
        profile=StageProfile(
            stage=rank, split="module", peak_memory=2**34 + rank, **ops
        )
        if finished
        else None,
        finished_iteration=IterationSample(
            index=_INDEX,
            seconds=_SECONDS,
            loss=draw.uniform(2, 3),
            plan_version=_VERSION,
            bubble_fraction=draw.uniform(0.1, 0.2),
        )
        if finished and rank == 0
        else None,
        ports=0,
        transports=[
            TransportSample(
                link=link, direction=direction, agreed="tcp", transport="tcp",
                fallbacks=0, failbacks=0, reconnects=0,
            )
            for direction, link in sends
        ],
    )  # fmt: skip


def _window(
    draw: random.Random, link: int, direction: str, slow: Mapping[int, float]
) -> LinkSample:
    usual = slow.get(link, NORMAL)
    least, middle, most = (usual * (1 + draw.uniform(0, 0.02) + more) for more in (0, 0.02, 0.04))
    return LinkSample.model_validate(
        {
            "link": link,
            "direction": direction,
            "route": Route.DIRECT,
            "transport": "gloo",
            "iteration": _ITERATION,
            "bytes": MESSAGES << 24,
            "queue_p50": draw.uniform(1e-5, 2e-5),
            "wire": WireTime(
                count=MESSAGES, exact=MESSAGES, min=least, p50=middle, p99=most, mean=middle
            ),
        }
    )


def parsed(body: str) -> LinkHealthReport:
    """The report, as the ingest reads it."""
    return LinkHealthReport.model_validate_json(body)
