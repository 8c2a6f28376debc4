"""Keeps a rank's state in shared memory, for the ranks that come after it.

When a rank dies, the host ends all ranks of the job and starts new ones: another *generation*.
Optimizers step at different moments on different ranks, so that at any time some ranks may stand
before an iteration and some in it. But no rank can end an iteration that another has not begun. So
each rank has two copies, of its state before each of the last two iterations that it has begun, and
of one iteration all ranks have one. A rank writes them itself, before it begins the iteration. They
are in files of the host's in memory, and outlive a process that is killed at any moment.

A rank whose memory is gone too, with its machine or pod, takes the copy of another that holds the
same part of the model: of another replica. Or it gets its own from another pod (:mod:`.neighbour`).

Copies belong to places. If ranks have changed places since they left, each gets its copy from where
it was; if layers have moved between stages, each composes its state from its own copy and those of
other stages (:mod:`.composed`).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipemorph.api.mesh import DATA, DIMENSIONS
from pipemorph.exits import TRIAL_ITERATIONS
from pipemorph.wire import IterationSample
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.state.gradients import levelled_over
from pipemorph_trainer.state.kept.choice import Offer
from pipemorph_trainer.state.kept.composed import Composed
from pipemorph_trainer.state.kept.copies import Form
from pipemorph_trainer.state.kept.held import HeldCopies
from pipemorph_trainer.state.kept.late import LateCopies
from pipemorph_trainer.state.kept.lending import memory_of
from pipemorph_trainer.state.kept.neighbour import Neighbour, Ring
from pipemorph_trainer.state.kept.resumed import Resumed
from pipemorph_trainer.state.kept.resuming import Resuming, shortfall
from pipemorph_trainer.state.kept.slots import Slot, Slots
from pipemorph_trainer.state.kept.values import Values, changes_within_iterations
from pipemorph_trainer.topology.placement import Placement
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

LOCK_SECONDS = 10.0
"""Longest wait for the process that was this rank before to end."""
SUMMED_AT_ONCE = 1 << 20
"""Most bytes of a copy whose checksum takes less than to have a thread do it."""
WRITE_SECONDS = 300.0
"""Longest wait for the copy before, which is being written beside."""
_OWN = re.compile(r"rank-(\d+)\.generation-(\d+)")

_numbers = itertools.count(1)
"""Of the pipelines of this process."""


class Keeper:
    """The copies of this rank's state, in ``folder``, before every ``every`` iterations; 0: only
    when ranks leave for another layout. Main thread only. ``late``: writes those of a device; None:
    all is in host memory. ``split``: by stage, how many layers it holds; empty: evenly many.

    They are in a subfolder ``rank-<PLACE>.generation-<G>``, which every generation takes over.
    ``place``: where this rank runs. ``changes``: the next generation may have more replicas or
    fewer, and the copies of this one fit those. ``tell``: passes on to the host that there are no
    copies, and why.
    """

    def __init__(
        self,
        folder: Path,
        values: Values,
        world: World,
        placements: Iterable[Placement],
        wait: CollectiveWait,
        *,
        generation: int,
        every: int = 1,
        late: LateCopies | None = None,
        place: int,
        changes: bool = False,
        split: tuple[int, ...] = (),
        tell: Callable[[str], None],
    ) -> None:
        self._pass_on = tell
        mesh = world.coordinate.mesh
        self._place = place
        self._part: dict[str, Any] = {
            "mesh": (replace(mesh, replicas=1) if changes else mesh).described(),
            "pipeline": next(_numbers),
            "split": list(split),
            # Ranks of other replicas have other numbers, and stay where they are.
            "rank": place if changes else world.coordinate.rank,
        }
        """What copies are of, for their marks."""
        self._generation = generation
        self._folder, self._values, self._world, self._wait = folder, values, world, wait
        self._every, self._began_with = every, 0 if every else -1
        self._alike = _slots(world, placements, shared=values.shared)
        mine = folder / f"rank-{place}.generation-{generation}"
        self._late = late
        # A copy is finished later than its iteration begins, by up to one copy.
        self._slots, self._held = Slots(mine, whole=1 if late is None else 2), HeldCopies(mine)
        self._sums = ThreadPoolExecutor(1, "pipemorph-sums")
        self._summing: Future[None] | None = None
        """The checksum of the newest copy, until it is there."""
        self._before: Slot | None = None
        """The copy of the layout before, until the new one counts."""
        self._neighbour: Neighbour | None = None
        self._why = values.refusal(on_device=late is not None) or self._open(folder, mine)
        """Why this rank keeps nothing; empty if it does."""
        self._inside = False
        """Whether an iteration runs, in which a step may be taken again."""
        self._due_next = True
        self.counts_from = -1
        """The iteration from which on this generation's layout counts. If ranks fail before it,
        those that follow may have the one before, so its copies stay."""
        if self._why:
            self._tell()
        elif values.optimizer is not None:
            # It may draw random numbers, such as for stochastic rounding.
            values.optimizer.register_step_post_hook(self._after_step)
            if late is not None:
                values.optimizer.register_step_pre_hook(lambda *_: late.before_step())

    def meet_neighbours(self, deadline: float) -> None:
        """Begin to send copies to another pod, if the job has several, from the next one on.
        Collective over all ranks. ``deadline``: longest wait for a message, seconds."""
        pod = "" if self._why else memory_of(self._folder)
        told = self._world.tell_all(pod, str)
        ring = Ring(told)
        if ring.pods < 2 or not all(told):
            if ring.pods > 1 and self._world.coordinate.rank == 0:
                without = [rank for rank, each in enumerate(told) if not each]
                log.warning("no pod holds copies of another: rank %d keeps nothing", without[0])
            return
        group = self._world.groups.new(backend="gloo", group_desc="pipemorph copies")
        self._neighbour = Neighbour(
            str(self._world.coordinate), ring, self._slots, self._held, group=group,
            deadline=deadline,
        )  # fmt: skip
        if self.counts_from >= 0:
            # Before rank 0 may say that the new layout counts: nobody goes on before it is there.
            self._neighbour.offer(self.counts_from - TRIAL_ITERATIONS)

    def why_fixed(self) -> str:
        """Why the state of this rank's part is of no use to ranks with other parts; empty if it
        is."""
        return self._values.why_fixed()

    @property
    def neighbour(self) -> Neighbour | None:
        """What sends copies to another pod, if anything does."""
        return self._neighbour

    def close(self, *, goodbye: bool) -> None:
        """End what runs beside. ``goodbye``: all ranks do so."""
        self._sums.shutdown(wait=False)
        if self._late is not None and goodbye:
            with contextlib.suppress(PipelineError):
                # Nobody needs it any more, but its thread uses the device.
                self._late.finish(WRITE_SECONDS)
        if self._neighbour is not None:
            self._neighbour.close(goodbye=goodbye)

    def _due(self, iteration: int) -> bool:
        """Whether the state before an iteration is kept: the same on all ranks."""
        # Of a new layout there is one already. No other takes the place of that of the one before.
        if not self._every or iteration <= self.counts_from:
            return False
        return iteration % self._every == 0 or iteration == self._began_with

    def _open(self, folder: Path, mine: Path) -> str:
        """Take over this rank's subfolder, or make one. Returns why that is not possible."""
        try:
            found = {
                int(match[2]): path
                for path in folder.iterdir()
                if (match := _OWN.fullmatch(path.name)) and int(match[1]) == self._place
            }
            path = found[max(found)] if found else mine
            path.mkdir(mode=0o700, exist_ok=True)
            why = self._lock(path / "lock")
            if not why and path != mine:
                path.rename(mine)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        return why

    def _lock(self, path: Path) -> str:
        """Have a subfolder for this process alone, until it ends. Returns why it has not."""
        # Stays open: a process that closes a file loses its locks on it.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                # Of the process, so that children which outlive it do not have it.
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    return f"a process of an earlier generation still has {path}"
                time.sleep(0.01)
            else:
                return ""

    def _tell(self) -> None:
        text = f"{self._world.coordinate} keeps no state in memory: {self._why}"
        log.warning("%s", text)
        self._pass_on(text)

    def mark(self, iteration: int, *, moving: bool = False) -> bool:
        """Say that an iteration is over, and the batch of the next one, ``iteration``, has not been
        drawn yet. Returns whether the state is kept before that, with what batches are drawn from
        as it is now. ``moving``: it is, as ranks leave for another layout."""
        self._inside = False
        self._due_next = (moving or self._due(iteration)) and not self._why
        if self._due_next:
            self._values.mark()
        return self._due_next

    def _after_step(self, *_: Any) -> None:
        if self._due_next and not self._inside and not self._why:
            self._values.mark_random()

    def begin(
        self,
        iteration: int,
        unreported: Sequence[IterationSample],
        *,
        synchronized: bool,
        moving: bool = False,
    ) -> None:
        """Copy the state before an iteration, if it is one that is kept, or if ranks leave for
        another layout (``moving``). ``unreported``: iterations that have not been reported.
        ``synchronized``: see :class:`~.choice.Offer`."""
        if self._why:
            return
        self._inside = True
        self._await_sum()
        if self._before is not None and iteration > self.counts_from:
            old, self._before = self._before, None
            self._slots.remove(lambda slot: slot is old)
        self._await_neighbour(iteration)
        if self._why or (not moving and not self._due(iteration)):
            return
        offer = Offer(iteration, synchronized)
        try:
            if self._late is not None:
                self._late.finish(WRITE_SECONDS)
            form, values, content = self._values.take(unreported)
            slot = self._make_room(form, len(content))
        except (
            OSError, ValueError, TypeError, AttributeError, pickle.PicklingError, PipelineError
        ) as error:  # fmt: skip
            # Of pickling: any of those in the middle.
            self._stop(error)
            return
        if self._late is None:
            self._write(slot, values, content, offer)
            return

        def write(found: Mapping[str, Tensor]) -> None:
            """In another thread."""
            self._write(slot, found, content, offer)

        try:
            self._late.begin(values, changes_within_iterations, write)
        except RuntimeError as error:  # As without page-locked memory.
            self._stop(error)

    def _await_sum(self) -> None:
        """Wait until the last copy has its checksum: it may be written next."""
        if self._summing is not None:
            self._summing.result()
            self._summing = None

    def _await_neighbour(self, iteration: int) -> None:
        """Wait until another pod has the newest copy from before ``iteration``. Whoever is told
        that an iteration is finished may rely on that."""
        neighbour = self._neighbour
        if neighbour is None:
            return
        if self._late is not None:
            try:
                self._late.finish(WRITE_SECONDS)
            except PipelineError as error:
                self._stop(error)
                return
        if neighbour.safe < neighbour.offered < iteration:
            of = neighbour.offered
            self._wait.waiting.begin(f"another pod to have its copy of iteration {of}")
            neighbour.await_safe(of)
            self._wait.waiting.end()

    def _make_room(self, form: Form, object_bytes: int) -> Slot:
        try:
            return self._slots.begin(form, object_bytes)
        except OSError as error:
            if self._neighbour is None or not self._slots.pinned:
                raise
            # A copy that another pod needs takes the place of one that this rank needs.
            self._neighbour.end(str(error.strerror))
            self._slots.unpin_all()
            return self._slots.begin(form, object_bytes)

    def _write(
        self, slot: Slot, values: Mapping[str, Tensor], content: bytes, offer: Offer
    ) -> None:
        assert slot.copy is not None
        slot.copy.begin()
        slot.copy.write(values)
        slot.copy.write_object(content)
        self._finish(slot, offer)

    def _finish(self, slot: Slot, offer: Offer) -> None:
        """A slot holds a whole copy."""
        self._slots.finish(slot, offer, self._part)
        assert slot.copy is not None
        if self._late is None and slot.copy.raw().numel() > SUMMED_AT_ONCE:
            self._summing = self._sums.submit(slot.copy.add_checksum)
        else:
            slot.copy.add_checksum()
        # Whoever has no state before iteration 0 begins there.
        if self._neighbour is not None and offer.iteration:
            self._neighbour.offer(offer.iteration)

    def _stop(self, error: Exception) -> None:
        self._why = str(error.strerror if isinstance(error, OSError) else error)
        if self._neighbour is not None:
            self._neighbour.end("this rank keeps nothing")
        self._remove()
        self._tell()

    def seal(self, iteration: int, *, exact: bool = True) -> str:
        """Finish the copy before an iteration, for the next layout. ``exact``: for a generation in
        which all have their own. Returns why there is none; empty if there is."""
        if self._late is not None and not self._why:
            try:
                self._late.finish(WRITE_SECONDS)
            except PipelineError as error:
                self._stop(error)
        self._await_sum()
        slot = None if self._why else self._slots.of(iteration)
        if slot is None:
            return self._why or f"it has no copy of iteration {iteration}"
        if not exact:
            return ""
        neighbour = self._neighbour
        if neighbour is not None and neighbour.offered == iteration:
            # A pod may be lost while a new layout is on trial, when no other copy of this is made.
            self._wait.waiting.begin(f"another pod to have its copy of iteration {iteration}")
            neighbour.await_safe(iteration)
            self._wait.waiting.end()
        assert slot.copy is not None and slot.offer is not None
        self._slots.finish(slot, slot.offer, {**slot.copy.mark, "left": self._generation})
        return ""

    def clear(self) -> None:
        """Remove all copies, which an earlier run has left."""
        if not self._why:
            self._remove()

    def _remove(self) -> None:
        self._slots.remove()
        self._held.remove()

    def began_with(self, iteration: int) -> None:
        """The first iteration of this generation, which is kept as well."""
        if self._every:
            self._began_with = iteration

    def resume(self, saved: int = 0) -> Resumed | str:
        """Go on with the state that was kept; or why that is not possible, and then nothing is
        changed and all copies are removed. Collective over all ranks. ``saved``: the iteration of
        the newest checkpoint, which goes before what is older.

        Raises :class:`PipelineError` on all ranks if a copy cannot be used after all; also if ranks
        that have just moved do not all have their own. Then the copies stay, for the next
        generation, which has the layout before.
        """
        resuming = Resuming(
            self._folder, self._slots, self._held, self._values, world=self._world, wait=self._wait,
            part=self._part, alike=self._alike, generation=self._generation, place=self._place,
        )  # fmt: skip
        found = resuming.agree(saved, self._why)
        state = found if isinstance(found, str) else resuming.state(found)
        if isinstance(found, str) or isinstance(state, str):
            self._remove()
            return str(state)
        own = found.own(self._world.coordinate.rank)
        unreported = self._values.apply(state, own=own)
        slot, left = self._slots.of(found.iteration), resuming.left
        assert slot is not None and slot.copy is not None
        # Others are older, or of an iteration that runs again.
        self._slots.keep_only(slot, *([] if left is None else [left]))
        self._held.keep_only(found.iteration, resuming.split)
        if resuming.moved:
            self.counts_from = found.iteration + TRIAL_ITERATIONS
            self._before = left if left is not slot else None
        if isinstance(state, Composed):
            self._keep_new_part(slot, found.iteration, unreported)
        if not own:
            # It has the random state of the other rank.
            self._values.mark()
            slot.copy.begin()
            slot.copy.write_object(self._values.take()[2])
            self._finish(slot, Offer(found.iteration))
        return Resumed(
            found.iteration,
            "kept" if found.exact else "neighbour" if found.neighbours else "replica",
            shortfall(found),
            unreported,
        )

    def _keep_new_part(
        self, old: Slot, iteration: int, unreported: Sequence[IterationSample]
    ) -> None:
        """Copy the state of this rank's new part. The copy of the part before stays as well until
        all know that rank 0 has said that the new parts count: if a rank fails earlier, all go on
        with that. Collective over all ranks.

        Raises :class:`PipelineError` on all ranks if one of them cannot.
        """
        self._values.mark()
        why = ""
        try:
            form, values, content = self._values.take(unreported)
            slot = self._slots.begin(form, len(content))
        except OSError as error:
            why = str(error.strerror)
        else:
            self._write(slot, values, content, Offer(iteration))
            self._slots.keep_only(old, slot)
            self._before = old
        for rank, each in enumerate(self._world.tell_all(why, str)):
            if each:
                raise PipelineError(f"rank {rank} cannot keep the state of its new part: {each}")


def _slots(world: World, placements: Iterable[Placement], *, shared: bool) -> list[Hashable]:
    """Of every rank, the coordinates that its state depends on."""
    alike: Collection[str] = set(DATA) if shared else ()
    for spread in placements:
        alike = set(alike) & set(levelled_over(spread))
    mesh = world.coordinate.mesh
    return [
        tuple(mesh.coordinate(rank).along(name) for name in DIMENSIONS if name not in alike)
        for rank in range(dist.get_world_size(world.control))
    ]
