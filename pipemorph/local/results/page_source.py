"""Data of a run's page: the state of its ranks, and the ops of its iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from pipemorph.control.decide.forecast import Outlook
from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.local.clock import now
from pipemorph.local.results.journal import RunJournal
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import JobStatus
from pipemorph.views.live_page.page_builder import (
    MOST_STEPS,
    StageTrace,
    WatchedJob,
    build_page_document,
    find_slowest_column,
)
from pipemorph.views.live_page.page_document import PageDocument, RecoveryEntry

TRACE_BYTES = 64 << 20
"""Bytes of the ranks' traces that are searched for the first viewer."""


class RunState(NamedTuple):
    """State of the ranks. ``outlook``: see :meth:`JobController.get_outlook`."""

    status: JobStatus
    outlook: Outlook | None
    recoveries: Sequence[RecoveryEntry] = ()


class TraceSource(Protocol):
    """Ops of iterations."""

    def list_iterations(self, column: int) -> list[int]:
        """Iterations of a column with ops, ascending."""
        ...

    def read_iteration(self, column: int, iteration: int) -> Sequence[StageTrace]:
        """Ops of an iteration, at least those of a column; empty if they are gone."""
        ...


class FolderTraceSource:
    """Ops from files that the ranks of a run write, of none without a folder. ``newest``: see
    :class:`TraceIndex`."""

    def __init__(self, folder: Path | None, newest: int | None = TRACE_BYTES) -> None:
        self._folder, self._index = folder, TraceIndex(newest=newest)

    def list_iterations(self, column: int) -> list[int]:
        if self._folder is not None:
            self._index.index_new_lines(self._folder)
        return self._index.list_iterations()

    def read_iteration(self, column: int, iteration: int) -> Sequence[StageTrace]:
        try:
            found = self._index.read_iterations([iteration])[iteration]
        except (OSError, ValueError, KeyError, TypeError):
            return []  # A rank has just shortened its file.
        return found if all(trace.iteration == iteration for trace in found) else []


@dataclass
class LivePageSource:
    """Data of a job's live page. ``read_run_state``: returns the state of the ranks, or raises
    TimeoutError if the control loop does not answer; ``gpus``: of all ranks, if the job's template
    does not define it; ``no_ops``: reason for missing ops, empty if unknown; ``result``: place of
    the job's result."""

    job: PipeMorphJob
    journal: RunJournal
    traces: TraceSource
    read_run_state: Callable[[], RunState]
    gpus: int = 0
    no_ops: str = ""
    result: str = "report.json of its folder"
    column: int | None = None
    """Column of the newest document."""

    def collect_state(self) -> WatchedJob:
        """Current state, without the ops."""
        ranks = self.read_run_state()
        return WatchedJob(
            job=self.job,
            now=now(),
            status=ranks.status,
            samples=self.journal.list_iterations(MOST_STEPS),
            changes=self.journal.list_changes(),
            link_history=self.journal.copy_link_history(),
            recoveries=ranks.recoveries,
            keep_reason=self.journal.view.keep_reason,
            outlook=ranks.outlook,
            gpus=self.gpus,
            missing_ops_reason=self.no_ops,
            result_location=self.result,
        )

    def make_document(
        self, column: int | None, iteration: int | None, number: int, live: bool
    ) -> PageDocument:
        """Document of an iteration, by default the newest, in a column, by default of the slowest
        link."""
        known = self.collect_state()
        if column is None or not 0 <= column < self.job.spec.parallelism.mesh.columns:
            column = find_slowest_column(known)
        self.column = column
        available = self.traces.list_iterations(column)
        if iteration not in available:
            iteration = available[-1] if available else None
        traces = [] if iteration is None else self.traces.read_iteration(column, iteration)
        return build_page_document(
            replace(known, available=available), traces, column=column, number=number, live=live
        )
