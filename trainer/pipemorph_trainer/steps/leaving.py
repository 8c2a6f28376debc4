"""Ends the ranks of a pipeline between two iterations when one of them was asked to end."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import NamedTuple

from pipemorph.api.layout import Layout
from pipemorph.exits import EXIT_MOVES, EXIT_SAVED, PARTS_STAY, leave_file, stay_file
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.signals import LastWord
from pipemorph_trainer.steps.parts import Parts
from pipemorph_trainer.steps.saving import Saving

log = logging.getLogger("pipemorph.trainer")


class Departure(NamedTuple):
    """How all ranks end: what rank 0 says, and the exit code of each."""

    text: str
    code: int


class Leaving:
    """Knows whether all ranks are to end, and prepares for it. Main thread only.

    A rank is asked by SIGTERM to save and to end, or by a file of its host to leave: for another
    layout, which is another place or another part, or since a replica joins. All ranks hear of it
    with the loss of an iteration.

    ``describe``: what this rank is waiting for; ``last``: called before a signal ends the process.
    """

    def __init__(
        self,
        parts: Parts,
        saving: Saving,
        context: TrainerContext,
        *,
        describe: Callable[[], str],
        last: Callable[[], None],
    ) -> None:
        self._parts, self._saving, self._context = parts, saving, context
        saves = parts.checkpoints is not None
        self._last_word = LastWord(describe, last, context.grace_seconds if saves else 0.0)
        kept, generation = context.kept_dir, context.generation
        self._leave = None if kept is None else kept / leave_file(generation)
        parts.iterations.ask(
            (lambda: self._last_word.asked) if saves else None,
            None if self._leave is None else self._leave.exists,
        )
        self.ending = False
        """Whether all ranks save before the next iteration and end."""
        self.moving = False
        """Whether all ranks leave for another layout before the next iteration."""

    def install(self) -> None:
        """Handle signals from now on."""
        self._last_word.install()

    def remove(self) -> None:
        """No longer handle signals. Idempotent."""
        self._last_word.remove()

    def hear(self) -> None:
        """Take over what all ranks have heard in the iteration that has ended. Between the steps of
        an accumulation none of them leaves."""
        iterations, may = self._parts.iterations, self._saving.synchronized
        self.ending = iterations.leaving and may
        self.moving = iterations.moving and may

    def saved_to_end(self, iteration: int) -> Departure | None:
        """If all ranks are to end, save before the iteration that they do not begin, unless its
        checkpoint is saved. None if they are not, or have done all iterations."""
        if not self.ending or self._complete(iteration):
            return None
        checkpoints = self._parts.checkpoints
        assert checkpoints is not None, "only a rank that can save waits for it after a SIGTERM"
        if self._saving.saved != iteration:
            self._saving.save(checkpoints, iteration)
        self._saving.finish_writing(needed=True)
        self._last_word.saved = True
        return Departure(
            f"saved the checkpoint of iteration {iteration}, since a rank was asked to end",
            EXIT_SAVED,
        )

    def sealed_to_move(self, iteration: int) -> Departure | None:
        """If all ranks are to leave for another layout, see that each has a copy of its state. None
        if they are not; also if one of them has no copy, or if they are to have other parts and
        cannot: then all go on, and rank 0 says so."""
        if not self.moving or self._complete(iteration):
            return None
        world = self._parts.world
        # Each pod has a host, and some may not have asked yet.
        layers = max(world.tell_all(self._asked_layers(), int))
        if layers and (why := self._parts.why_fixed(layers)):
            self._stay(f"{PARTS_STAY}{why}")
            return None
        keeper = self._parts.keeper
        job = self._context.job
        # A replica that joins has nothing of its own.
        exact = job is None or job.spec.parallelism.min_replicas is None
        why = "it keeps no state" if keeper is None else keeper.seal(iteration, exact=exact)
        lacks = [f"rank {r}: {w}" for r, w in enumerate(world.tell_all(why, str)) if w]
        if lacks:
            self._stay(lacks[0])
            return None
        where = "with other layers" if layers else "for other places"
        if not exact:
            where = "so that a replica can join"
        return Departure(f"left at iteration {iteration}, {where}", EXIT_MOVES)

    def _asked_layers(self) -> int:
        """How many layers the host has spread anew; 0 if each stage is to hold what it holds."""
        if self._leave is None:
            return 0
        try:
            asked = tuple(json.loads(self._leave.read_text() or "[]"))
        except FileNotFoundError:
            # Another pod's host has asked. Or it has taken it back: a rank has failed.
            return 0
        mesh, total = self._parts.coordinate.mesh, sum(asked)
        here = Layout.first(mesh).with_layers(self._context.split(mesh.stages))
        return 0 if asked == here.spread(total) else total

    def _stay(self, why: str) -> None:
        """Say why the ranks do not leave, after all."""
        context, folder = self._context, self._context.kept_dir
        if folder is not None:
            if self._parts.coordinate.rank == 0:
                log.warning("ranks go on as they are: %s", why)
                (folder / stay_file(context.generation)).write_text(why)
            # Pods have one each.
            (folder / leave_file(context.generation)).unlink(missing_ok=True)

    def _complete(self, iteration: int) -> bool:
        """Whether all iterations of the manifest are done."""
        wanted = self._context.iterations
        return 0 < wanted <= iteration
