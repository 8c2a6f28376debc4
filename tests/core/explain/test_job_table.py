"""Table of jobs from their status."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_jobs import (
    CHANGE,
    SLOW,
    WELL,
    adapted,
    at,
    cluster_job,
    found,
    healthy,
    running,
    slow_link,
)

from pipemorph.commands.cluster.top import build_job_table
from pipemorph.spec.job_status import JobStatus
from pipemorph.spec.status_recoveries import Recoveries, RecoveryRecord
from pipemorph.terminal import render_parts
from pipemorph.views.explanation.explained_job import ExplainedJob, parse_job_object


def job(name: str, status: JobStatus | None, **fields: Any) -> ExplainedJob:
    return parse_job_object(cluster_job(name, status, **fields))


GPT = job("gpt", running(adapted(), SLOW, ready="8/8", goodput=0.913), replicas=2)
DONE = job(
    "done",
    JobStatus(
        state="Complete",
        ready="0/4",
        training=healthy(iteration=999, adaptations=3, saved_seconds=5400.0),
        conditions=[found("LinksHealthy", "Unknown", "JobFinished", "the job has finished", 60)],
    ),
)
SMALL = job("small", running(healthy(), WELL), namespace="other")
NEW = job("new", None)


def test_a_line_per_job() -> None:
    assert render_parts(build_job_table([GPT, SMALL, NEW, DONE])) == (
        """\
NAMESPACE  NAME   STATE     READY  DONE        LEFT  S/ITER  SLOW LINKS     PLAN  """
        """GAIN (PROMISED)  GOODPUT       SAVED  RECOVERIES
other      small  Running   4/4      4%  6 min 34 s    0.41  none             v0  """
        """-                      -           -           0
team       done   Complete  0/4    100%           -    0.41  -                v0  """
        """-                      -  1 h 30 min           0
team       gpt    Running   8/8     11%  7 min 21 s     0.5  link 2 +60 ms    v1  """
        """53% (56%)            91%   1 min 4 s           0
team       new    -         -         -           -       -  -                 -  """
        """-                      -           -           -
"""
    )
    assert render_parts(build_job_table([NEW], namespaced=False)).splitlines()[1].split() == [
        "new",
        *["-"] * 11,
    ]


RECOVERED = Recoveries(count=2, last=[RecoveryRecord(generation=2, lost_at=at(60), cause="x")])
SILENT = found("LinksHealthy", "Unknown", "ReportsStale", "no report for 60 s", 70)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (JobStatus(state="Pending"), "Pending"),
        (running(healthy(), SILENT), "no reports"),
        (running(adapted(slow_link(0, 12.4), slow_link(2, 83.0)), SLOW), "link 2 +83 ms, 1 more"),
        (running(adapted(saved_seconds=-64.0), SLOW), "-1 min 4 s"),
        (
            running(adapted(last_adaptation=CHANGE.model_copy(update={"measured": None})), SLOW),
            "not yet (56%)",
        ),
        (running(healthy(), WELL, recoveries=RECOVERED), "  2\n"),
    ],
    ids=["pending", "silent", "slow", "costly", "not measured", "recovered"],
)
def test_cells(status: JobStatus, words: str) -> None:
    assert words in render_parts(build_job_table([job("gpt", status)]))


def test_control_characters_do_not_reach_the_terminal() -> None:
    shown = render_parts(build_job_table([job("gpt", running(healthy(), WELL, ready="\x1b[2J"))]))
    assert all(line.isprintable() for line in shown.splitlines())
