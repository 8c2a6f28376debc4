"""Changes the layout of jobs in pods: ranks change places, or layers move between stages.

After a job's reports it is looked whether another layout would pay, by the rules that ``pipemorph
run`` goes by (:mod:`pipemorph.control.decide.layouts.moves`). The search has its turn in the
planner's processes. Then the launchers are told, and what they tell of the generation that follows
says what became of it (:mod:`pipemorph.control.generations`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pipemorph.control import JobController
from pipemorph.control.decide.layouts.moves import Move, Moves, Question
from pipemorph.control.generations import Generations
from pipemorph.errors import InputError
from pipemorph.ingest import GenerationDesk, PlannerLost, Search, search_here
from pipemorph_operator.ingest.status.tracked import Key, TrackedJob

log = logging.getLogger("pipemorph.ingest")

START_SECONDS = 60.0
"""What a change is expected to take where no start of the ranks was seen, as by an ingest that has
taken the job over: more than most take."""


def follow(moves: Moves, controller: JobController, generations: Generations) -> None:
    """Take which generation runs, and tell the controller of another layout."""
    before = moves.layout
    moves.follow(controller.finished)
    for last in generations.saved.last[-1:] if moves.arrives else ():
        if last.seconds is not None and last.went_on_with is not None:
            moves.arrived(last.went_on_with, last.seconds)
    placed = moves.layout.places != before.places
    if placed or generations.layout.layers != controller.layers:
        slow = moves.late_links() if placed else None
        controller.change_layout(slow, generations.layout.layers)


class LayoutMoves:
    """Decides for all jobs of a host. For use in one event loop. ``find``: returns the job of a
    namespace and name; None if the host has no such job. ``search``: in other processes, so that it
    does not block the loop."""

    def __init__(
        self,
        find: Callable[[str, str], TrackedJob | None],
        desk: GenerationDesk,
        search: Search = search_here,
    ) -> None:
        self._find, self._desk, self._search = find, desk, search
        self.under_way: dict[Key, asyncio.Task[None]] = {}
        """Searches, and what follows them."""

    def reported(self, namespace: str, name: str) -> None:
        """Look at a job of which a report was taken."""
        key, job = (namespace, name), self._find(namespace, name)
        if job is None or job.moves is None or key in self.under_way:
            return
        moves, controller, generations = job.moves, job.controller, job.generations
        try:
            follow(moves, controller, generations)
            network = controller.network(time.time()) if moves.is_due() else None
            if network is None:
                return
            cost = generations.progress.longest_start or START_SECONDS
            back = moves.undo(controller.finished, network.left, cost)
            questions = [] if back is not None else list(moves.questions(network, cost))
        except Exception:
            # Reports are answered, and the job goes on, without another layout.
            log.exception("%s/%s: no other layout can be looked for", namespace, name)
            return
        if back is not None or questions:
            task = asyncio.create_task(self._move(key, job, moves, back, questions))
            self.under_way[key] = task
            task.add_done_callback(lambda _: self.under_way.pop(key, None))

    def close(self) -> None:
        """End the searches."""
        for task in self.under_way.values():
            task.cancel()

    async def _move(
        self,
        key: Key,
        job: TrackedJob,
        moves: Moves,
        move: Move | None,
        questions: list[Question],
    ) -> None:
        """Search, and have the ranks leave if that pays."""
        try:
            for question in questions:
                found = await self._search(key, question)
                if self._find(*key) is not job:
                    return
                follow(moves, job.controller, job.generations)
                if (move := moves.answer(question, found)) is not None:
                    break
            if move is not None:
                await self._ask(key, job.generations, moves, move)
        except (PlannerLost, OSError, InputError) as error:
            # A later look asks again.
            log.error("%s/%s: no other layout was found: %s", *key, error)

    async def _ask(self, key: Key, generations: Generations, moves: Moves, move: Move) -> None:
        layout = move.proposal.layout.told
        of = generations.attempt, generations.saved.generation
        promised = round(move.proposal.promised, 4)
        taken = await self._desk.ask(*key, layout, of=of, promised=promised, undoes=move.undoes)
        if taken:
            moves.ask(move)
        else:
            # A new generation may have begun meanwhile, as others had the job's turn.
            log.info("%s/%s: the ranks end, start again, or lack a pod: %s", *key, move.reason)
