"""Changes the layout of jobs in pods: ranks change places, or layers move between stages.

After a report of a job, another layout is searched for in the planner's processes, by the rules
that ``pipemorph run`` uses too (:mod:`pipemorph.control.decide.layouts.layout_changes`). If one
pays, the launchers get a request to restart the ranks with it. Their reports of the next generation
show whether it runs (:mod:`pipemorph.control.job_generations`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pipemorph.control import JobController
from pipemorph.control.decide.layouts.layout_changes import (
    LayoutChange,
    LayoutChanges,
    LayoutSearchRequest,
)
from pipemorph.control.job_generations import JobGenerations
from pipemorph.errors import InputError
from pipemorph.ingest import PlannerLostError, RestartHandler, Search, search_in_process
from pipemorph_operator.ingest.status.tracked_job import Key, TrackedJob

log = logging.getLogger("pipemorph.ingest")

START_SECONDS = 60.0
"""Expected duration of a change if no start of the ranks was measured, such as after a takeover of
the job: longer than most changes."""


def update_layout(
    moves: LayoutChanges, controller: JobController, generations: JobGenerations
) -> None:
    """Update ``moves`` to the running generation, and the controller to a changed layout."""
    before = moves.layout
    moves.follow_generation(controller.finished_iterations)
    for last in generations.saved.last[-1:] if moves.awaits_first_iteration else ():
        if last.seconds is not None and last.went_on_with is not None:
            moves.record_first_iteration(last.went_on_with, last.seconds)
    placed = moves.layout.places != before.places
    if placed or generations.layout.layers != controller.layers:
        slow = moves.list_late_links() if placed else None
        controller.change_layout(slow, generations.layout.layers)


class LayoutChanger:
    """Changes the layouts of all jobs of a host, within one event loop. ``find`` returns the job of
    a namespace and name, or None. ``search`` must run in other processes, so that it does not block
    the loop."""

    def __init__(
        self,
        find: Callable[[str, str], TrackedJob | None],
        restart_handler: RestartHandler,
        search: Search = search_in_process,
    ) -> None:
        self._find, self._restart_handler, self._search = find, restart_handler, search
        self.under_way: dict[Key, asyncio.Task[None]] = {}
        """Tasks of searches and of the changes that follow."""

    def process_report(self, namespace: str, name: str) -> None:
        """Search for another layout of a job after its report, if that is due."""
        key, job = (namespace, name), self._find(namespace, name)
        if job is None or job.moves is None or key in self.under_way:
            return
        moves, controller, generations = job.moves, job.controller, job.generations
        try:
            update_layout(moves, controller, generations)
            network = controller.measure_network(time.time()) if moves.is_check_due() else None
            if network is None:
                return
            cost = generations.progress.longest_start or START_SECONDS
            back = moves.find_change_to_undo(
                controller.finished_iterations, network.iterations_remaining, cost
            )
            questions = [] if back is not None else list(moves.list_searches(network, cost))
        except Exception:
            # Reports are answered, and the job continues, without another layout.
            log.exception("%s/%s: the search for another layout failed", namespace, name)
            return
        if back is not None or questions:
            task = asyncio.create_task(self._search_and_request(key, job, moves, back, questions))
            self.under_way[key] = task
            task.add_done_callback(lambda _: self.under_way.pop(key, None))

    def close(self) -> None:
        """Cancel the searches."""
        for task in self.under_way.values():
            task.cancel()

    async def _search_and_request(
        self,
        key: Key,
        job: TrackedJob,
        moves: LayoutChanges,
        move: LayoutChange | None,
        questions: list[LayoutSearchRequest],
    ) -> None:
        """Search for a layout, and request it if it pays."""
        try:
            for question in questions:
                found = await self._search(key, question)
                if self._find(*key) is not job:
                    return
                update_layout(moves, job.controller, job.generations)
                if (move := moves.judge_proposal(question, found)) is not None:
                    break
            if move is not None:
                await self._request_layout(key, job.generations, moves, move)
        except (PlannerLostError, OSError, InputError) as error:
            # A later report starts the next search.
            log.error("%s/%s: the search for another layout failed: %s", *key, error)

    async def _request_layout(
        self, key: Key, generations: JobGenerations, moves: LayoutChanges, move: LayoutChange
    ) -> None:
        layout = move.proposal.layout.rank_layout
        of = generations.attempt, generations.saved.generation
        promised = round(move.proposal.promised_gain, 4)
        taken = await self._restart_handler.request_layout(
            *key, layout, of=of, promised=promised, undoes=move.undoes_change
        )
        if taken:
            moves.record_request(move)
        else:
            # A new generation may have begun during the search.
            log.info("%s/%s: layout not changed, ranks are not all running: %s", *key, move.reason)
