"""Has layers move between the stages of jobs in pods.

After a job's reports it is looked whether another split of its layers would pay, by the rules that
``pipemorph run`` goes by (:mod:`pipemorph.control.decide.layouts.moves`). The search has its turn
in the planner's processes. Then the launchers are told, and what they tell of the generation that
follows says what became of it (:mod:`pipemorph.control.generations`).

Ranks do not change places here: their state would have to go to other pods.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.control.decide.layouts.moves import (
    BEFORE,
    PLACES_SECONDS,
    SETTLES,
    Move,
    Moves,
    Question,
    brought,
)
from pipemorph.control.generations import Generations
from pipemorph.control.pods.splits import split_of
from pipemorph.errors import InputError, one_line
from pipemorph.ingest import GenerationDesk, PlannerLost, Search, search_here

log = logging.getLogger("pipemorph.ingest")

Key = tuple[str, str]

COMPARED = 16
"""Iterations with other layers after which it is told what they brought."""

START_SECONDS = 60.0
"""What a change is expected to take where no start of the ranks was seen, as by an ingest that has
taken the job over: more than most take."""


class JobMoves:
    """The splits of one job's layers. ``name``: of the job, for the log; ``clock``: monotonic,
    seconds."""

    def __init__(
        self, spec: JobSpec, generations: Generations, name: str, clock: Callable[[], float]
    ) -> None:
        self._name, self._clock = name, clock
        self.told = ""
        """The newest word of what was decided and done, for people."""
        self.moves = Moves(
            spec, self._note, clock, layers=generations.layers, before=generations.layers_before
        )
        self._seen = generations.attempt, generations.saved.generation
        self._looked_at = -math.inf
        self._before: list[float] = []
        """Seconds of the last iterations before the newest move."""
        self._compared: Move | None = None
        """The move of which it is known what it has brought."""
        self.asking = False
        """Whether a split is searched for, or launchers are about to be told of one."""

    def _note(self, text: str) -> None:
        self.told = one_line(text)
        log.info("%s: %s", self._name, self.told)

    def follow(self, controller: JobController, generations: Generations) -> None:
        """Take which generation runs, and tell the controller of the layers of its stages."""
        moves, layers = self.moves, generations.layers
        counts = generations.layers_before is None
        if moves.settling and counts and layers == moves.layout.layers:
            moves.counts()
        if moves.settling and generations.splits.fixed:
            moves.cannot(generations.splits.fixed)
        now = generations.attempt, generations.saved.generation
        if now != self._seen:
            again, self._seen = now[0] != self._seen[0], now
            asked = moves.asked.proposal.layout.layers if moves.asked is not None else None
            if moves.leaving and not again and layers == asked:
                moves.left(now[1])
                self._before = [each.seconds for each in controller.finished[-BEFORE:]]
            else:
                moves.failed(attempt=again)
        for each in generations.splits.refused:
            moves.refuse(split_of(each))
        if layers != moves.layout.layers:
            moves.follow(layers)
        if moves.leaving and not self.asking and not generations.splits.asked:
            moves.stay(generations.stays or "they were not asked to leave")
        if moves.arrives is not None:
            self._arrive(generations)
        if layers != controller.layers:
            controller.change_layout(None, layers)
        for move in moves.made[-1:]:
            if move.iteration is not None and move is not self._compared:
                self._compare(move, controller, generations)

    def _arrive(self, generations: Generations) -> None:
        """Take when the ranks with the new layers have finished an iteration."""
        for last in generations.saved.last[-1:]:
            if last.seconds is not None and last.went_on_with is not None:
                self.moves.arrived(last.went_on_with, last.seconds)

    def _compare(self, move: Move, controller: JobController, generations: Generations) -> None:
        """Tell what the move has brought, once enough iterations are finished."""
        assert move.iteration is not None
        first = move.iteration + SETTLES
        now = [each.seconds for each in controller.finished if each.index >= first]
        if len(now) < COMPARED:
            return
        self._compared = move
        if (measured := brought(self._before, now)) is not None:
            self._note(
                f"{move.where} an iteration takes {measured:.0%} less time than before,"
                f" {move.proposal.promised:.0%} promised"
            )
            if move.generation is not None:
                generations.brought(move.generation, round(measured, 4))

    def question(self, controller: JobController, generations: Generations) -> Question | None:
        """Whether to look for another split now. At most one look a second."""
        now = self._clock()
        if self.asking or now < self._looked_at + PLACES_SECONDS or not self.moves.decides:
            return None
        if not generations.splits.move:
            return None  # Its pods began without that, and would not pass it on.
        self._looked_at = now
        if generations.layers_before is not None or generations.state.over:
            return None
        network = controller.network(time.time())
        if network is None:
            return None
        # Nobody changes places by what wires are late, and of a large job they are many.
        cost = generations.progress.longest_start or START_SECONDS
        return self.moves.of_layers(network, cost, seen=False)


class MovingJob(Protocol):
    """A job of the host. ``moves``: None if its layers cannot move."""

    @property
    def controller(self) -> JobController: ...

    @property
    def generations(self) -> Generations: ...

    @property
    def moves(self) -> JobMoves | None: ...


class MovingStore(Protocol):
    """Has the jobs of a host."""

    def moving(self, namespace: str, job: str) -> MovingJob | None:
        """A job; None if the host has no such job."""


class LayerMoves:
    """Decides for all jobs of a host. For use in one event loop. ``search``: in other processes, so
    that it does not block the loop."""

    def __init__(
        self, store: MovingStore, desk: GenerationDesk, search: Search = search_here
    ) -> None:
        self._store, self._desk, self._search = store, desk, search
        self.under_way: set[asyncio.Task[None]] = set()
        """Searches, and what follows them."""

    def reported(self, namespace: str, name: str) -> None:
        """Look at a job of which a report was taken."""
        job = self._store.moving(namespace, name)
        mine = job.moves if job is not None else None
        if job is None or mine is None:
            return
        try:
            mine.follow(job.controller, job.generations)
            question = mine.question(job.controller, job.generations)
        except Exception:
            # Reports are answered, and the job goes on, without other layers.
            log.exception("%s/%s: no other split of its layers can be looked for", namespace, name)
            return
        if question is not None:
            mine.asking = True
            task = asyncio.create_task(self._move((namespace, name), job, mine, question))
            self.under_way.add(task)
            task.add_done_callback(self.under_way.discard)

    def close(self) -> None:
        """End the searches."""
        for task in self.under_way:
            task.cancel()

    async def _move(self, key: Key, job: MovingJob, mine: JobMoves, asked: Question) -> None:
        """Search, and have the ranks leave if that pays."""
        try:
            found = await self._search(key, asked)
            if self._store.moving(*key) is not job:
                return
            mine.follow(job.controller, job.generations)
            move = mine.moves.answer(asked, found)
            if move is None or asked.split is None:
                return
            mine.moves.ask(move)
            layers = move.proposal.layout.spread(asked.split.total)
            of = job.generations.attempt, job.generations.saved.generation
            promised = round(move.proposal.promised, 4)
            taken = await self._desk.ask(*key, layers, of=of, promised=promised)
            # A new generation may have begun meanwhile, as others had the job's turn.
            if not taken and mine.moves.asked is move and mine.moves.leaving:
                fixed = job.generations.splits.fixed
                mine.moves.stay(fixed or "the ranks end, or start again, or lack a pod")
        except (PlannerLost, OSError, InputError) as error:
            # A later look asks again.
            log.error("%s/%s: no other split of its layers was found: %s", *key, error)
        finally:
            mine.asking = False
