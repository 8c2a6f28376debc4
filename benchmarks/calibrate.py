"""Costs of ops and hops in the executor, from the traces of an undisturbed emulated run.

The controller predicts with the same inputs, measured op times and wire times. Here they come from
the ranks' op traces, so that the cost of handing over a message counts where it arises.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ExecutorCosts:
    """Costs in seconds. ``ops``: from the start of an op to that of the next op that did not wait,
    per kind; ``hop``: from the end of an op to the start of the op that waited for its message;
    ``boundary``: from the last op of an iteration to the next iteration."""

    ops: dict[str, float]
    hop: float
    boundary: float


def read_costs(folder: Path, iteration_seconds: list[float]) -> ExecutorCosts:
    """Read the costs from ``ops-rank*.jsonl`` in ``folder`` and the times of its iterations, except
    the first one, which exchanges shapes. Raises ValueError without traces."""
    traces: dict[tuple[int, int], dict[str, Any]] = {}
    for path in sorted(folder.glob("ops-rank*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            if "ops" not in found:
                raise ValueError(f"{path} has dropped {found['dropped']} iterations")
            traces[found["stage"], found["iteration"]] = found
    timed = range(1, len(iteration_seconds))
    iterations = sorted({iteration for _, iteration in traces if iteration in timed})
    if not iterations:
        raise ValueError(f"no op traces of a second iteration in {folder}")
    pitch: dict[str, list[float]] = {"F": [], "B": [], "W": []}
    hops, ends = [], []
    for iteration in iterations:
        stages = sorted(stage for stage, index in traces if index == iteration)
        base = traces[0, iteration]["origin"]
        end_of: dict[tuple[int, str, int], float] = {}
        for stage in stages:
            trace = traces[stage, iteration]
            for kind, microbatch, _, end in trace["ops"]:
                end_of[stage, kind, microbatch] = trace["origin"] + end
        for stage in stages:
            trace = traces[stage, iteration]
            waited = {(kind, microbatch) for kind, microbatch, _, _ in trace["waits"]}
            ops = trace["ops"]
            for (kind, _, start, _), (after, m, next_start, _) in pairwise(ops):
                if (after, m) not in waited:
                    pitch[kind].append(next_start - start)
            for kind, microbatch, start, _ in ops:
                if (kind, microbatch) in waited:
                    sender = stage - 1 if kind == "F" else stage + 1
                    sent = end_of[sender, kind, microbatch]
                    hops.append(trace["origin"] + start - sent)
        ends.append(max(end_of.values()) - base)
    boundaries = [t - e for t, e in zip(iteration_seconds[1:], ends, strict=False)]
    return ExecutorCosts(
        {kind: statistics.median(values) for kind, values in pitch.items()},
        statistics.median(hops),
        statistics.median(boundaries),
    )
