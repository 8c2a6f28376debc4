"""Copies a rank's state to shared memory, from which the rank's next process resumes.

When a rank dies, the host ends all ranks of the job and starts new ones: the next *generation*. At
that moment some ranks may be before an iteration and others in it. But no rank can end an iteration
that another has not begun. So each rank holds two copies, of its state before each of the last two
iterations that it has begun, and for at least one iteration all ranks have a copy. A rank writes
the copy before it begins the iteration, into files in memory that belong to the host. They outlive
a process that is killed at any moment.

If a machine or pod is lost with its memory, a rank loads the copy of the same stage of another
replica, or its own copy from another pod (:mod:`.neighbour`).

Copies belong to places. If ranks have changed places, each gets its copy from its earlier place. If
layers have moved between stages, each rank composes its state from its own copy and those of other
stages (:mod:`.composition`).
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

from pipemorph.exits import TRIAL_ITERATIONS
from pipemorph.protocol import IterationSample
from pipemorph.spec.mesh import DATA_DIMENSIONS, DIMENSIONS
from pipemorph_trainer.checkpoint.memory.composition import ComposedState
from pipemorph_trainer.checkpoint.memory.copy_slots import CopySlot, CopySlots
from pipemorph_trainer.checkpoint.memory.device_copy import DeviceCopier
from pipemorph_trainer.checkpoint.memory.layer_loans import identify_memory
from pipemorph_trainer.checkpoint.memory.neighbour import NeighbourReplicator, PodRing
from pipemorph_trainer.checkpoint.memory.neighbour_copies import NeighbourCopies
from pipemorph_trainer.checkpoint.memory.rank_state import RankState, changes_within_iterations
from pipemorph_trainer.checkpoint.memory.resume_agreement import ResumeAgreement, describe_shortfall
from pipemorph_trainer.checkpoint.memory.resume_point import ResumePoint
from pipemorph_trainer.checkpoint.memory.source_choice import CopyOffer
from pipemorph_trainer.checkpoint.memory.state_copy import CopyForm
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.waiting import CollectiveWaiter
from pipemorph_trainer.sync.gradients import get_replicated_dimensions
from pipemorph_trainer.topology.placement import TensorPlacement
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

LOCK_SECONDS = 10.0
"""Timeout for the rank's previous process to exit."""
CHECKSUM_INLINE_BYTES = 1 << 20
"""Largest copy whose checksum is computed at once; a thread would cost more time."""
WRITE_SECONDS = 300.0
"""Timeout for the previous copy, which a thread is writing."""
_OWN = re.compile(r"rank-(\d+)\.generation-(\d+)")

_numbers = itertools.count(1)
"""Numbers of this process's pipelines."""


class InMemoryCheckpointer:
    """Copies this rank's state to ``folder``, before every ``every`` iterations; 0: only when ranks
    stop for another layout. Main thread only. ``device_copier``: copies a device's state; None: all
    state is in host memory. ``split``: number of layers of each stage; empty: evenly split.

    The copies are in a subfolder ``rank-<PLACE>.generation-<G>``, which each generation takes over.
    ``place``: where this rank runs. ``changes``: the next generation may have another number of
    replicas, and still use these copies. ``report``: reports to the host why there are no copies.
    """

    def __init__(
        self,
        folder: Path,
        values: RankState,
        world: World,
        placements: Iterable[TensorPlacement],
        wait: CollectiveWaiter,
        *,
        generation: int,
        every: int = 1,
        device_copier: DeviceCopier | None = None,
        place: int,
        changes: bool = False,
        split: tuple[int, ...] = (),
        report: Callable[[str], None],
    ) -> None:
        self._report = report
        mesh = world.coordinate.mesh
        self._place = place
        self._part: dict[str, Any] = {
            "mesh": (replace(mesh, replicas=1) if changes else mesh).describe_order(),
            "pipeline": next(_numbers),
            "split": list(split),
            # With another number of replicas, ranks are renumbered but stay at their places.
            "rank": place if changes else world.coordinate.rank,
        }
        """Identity of this rank's state, for the marks of its copies."""
        self._generation = generation
        self._folder, self._values, self._world, self._wait = folder, values, world, wait
        self._every, self._began_with = every, 0 if every else -1
        self._state_keys = _list_state_keys(world, placements, shared=values.shared_by_replicas)
        own = folder / f"rank-{place}.generation-{generation}"
        self._device_copier = device_copier
        # The newest copy may still be unfinished when its iteration has begun.
        self._slots = CopySlots(own, whole=1 if device_copier is None else 2)
        self._held = NeighbourCopies(own)
        self._sums = ThreadPoolExecutor(1, "pipemorph-sums")
        self._summing: Future[None] | None = None
        """Task that computes the newest copy's checksum; None if it is done."""
        self._before: CopySlot | None = None
        """Copy of the previous layout, while the new layout is on trial."""
        self._neighbour: NeighbourReplicator | None = None
        self._why = values.find_copy_obstacle(
            on_device=device_copier is not None
        ) or self._open_folder(folder, own)
        """Reason why this rank makes no copies; empty if it does."""
        self._inside = False
        """True during an iteration, in which a step may be repeated."""
        self._due_next = True
        self.counts_from = -1
        """First iteration after the trial of this generation's layout. If ranks fail before it, the
        next generation may return to the previous layout, so its copies stay."""
        if self._why:
            self._report_unavailable()
        elif values.optimizer is not None:
            # A step may draw random numbers, for example for stochastic rounding.
            values.optimizer.register_step_post_hook(self._after_optimizer_step)
            if device_copier is not None:
                values.optimizer.register_step_pre_hook(lambda *_: device_copier.before_step())

    def connect_neighbours(self, deadline: float) -> None:
        """Begin to send copies to another pod, if the job has several, with the next copy.
        Collective over all ranks. ``deadline``: longest wait for a message, seconds."""
        pod = "" if self._why else identify_memory(self._folder)
        pods = self._world.gather_all(pod, str)
        ring = PodRing(pods)
        if ring.pods < 2 or not all(pods):
            if ring.pods > 1 and self._world.coordinate.rank == 0:
                without = [rank for rank, each in enumerate(pods) if not each]
                log.warning("no pod holds copies of another, since rank %d makes none", without[0])
            return
        group = self._world.groups.create_group(backend="gloo", group_desc="pipemorph copies")
        self._neighbour = NeighbourReplicator(
            str(self._world.coordinate), ring, self._slots, self._held, group=group,
            deadline=deadline,
        )  # fmt: skip
        if self.counts_from >= 0:
            # Sent before rank 0 confirms the layout: no rank proceeds until the copy has arrived.
            self._neighbour.offer_copy(self.counts_from - TRIAL_ITERATIONS)

    def find_move_obstacle(self) -> str:
        """Explain why ranks with other parts of the model cannot use this rank's state; empty if
        they can."""
        return self._values.find_move_obstacle()

    @property
    def neighbour(self) -> NeighbourReplicator | None:
        """Sender of copies to another pod; None if there is none."""
        return self._neighbour

    def close(self, *, goodbye: bool) -> None:
        """End the threads. ``goodbye``: all ranks call it, and none has failed."""
        self._sums.shutdown(wait=False)
        if self._device_copier is not None and goodbye:
            with contextlib.suppress(PipelineError):
                # The copy is no longer needed, but its thread uses the device.
                self._device_copier.finish_copy(WRITE_SECONDS)
        if self._neighbour is not None:
            self._neighbour.close(goodbye=goodbye)

    def _is_due(self, iteration: int) -> bool:
        """True if the state before an iteration is copied; the same on all ranks."""
        # A new layout begins with a copy. No other may replace that of the previous layout.
        if not self._every or iteration <= self.counts_from:
            return False
        return iteration % self._every == 0 or iteration == self._began_with

    def _open_folder(self, folder: Path, own: Path) -> str:
        """Take over this rank's subfolder, or make one. Returns the reason if it cannot."""
        try:
            found = {
                int(match[2]): path
                for path in folder.iterdir()
                if (match := _OWN.fullmatch(path.name)) and int(match[1]) == self._place
            }
            path = found[max(found)] if found else own
            path.mkdir(mode=0o700, exist_ok=True)
            why = self._lock_folder(path / "lock")
            if not why and path != own:
                path.rename(own)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        return why

    def _lock_folder(self, path: Path) -> str:
        """Lock a subfolder until this process ends. Returns the reason if it cannot."""
        # The file stays open: a process that closes it loses its locks on it.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                # A lock of the process: children that outlive it do not inherit it.
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    return f"a process of an earlier generation still locks {path}"
                time.sleep(0.01)
            else:
                return ""

    def _report_unavailable(self) -> None:
        text = f"{self._world.coordinate} keeps no copy of its state in memory: {self._why}"
        log.warning("%s", text)
        self._report(text)

    def mark_iteration_end(self, iteration: int, *, moving: bool = False) -> bool:
        """Mark the end of an iteration, before the batch of the next, ``iteration``, is drawn.
        Returns True if the state before ``iteration`` will be copied; then captures the state of
        the objects that yield batches. ``moving``: ranks stop for another layout, so it will be."""
        self._inside = False
        self._due_next = (moving or self._is_due(iteration)) and not self._why
        if self._due_next:
            self._values.capture_batch_state()
        return self._due_next

    def _after_optimizer_step(self, *_: Any) -> None:
        if self._due_next and not self._inside and not self._why:
            self._values.capture_random_state()

    def copy_before_iteration(
        self,
        iteration: int,
        unreported: Sequence[IterationSample],
        *,
        synchronized: bool,
        moving: bool = False,
    ) -> None:
        """Copy the state before an iteration if that is due, or if ranks stop for another layout
        (``moving``). ``unreported``: iterations that have not been reported. ``synchronized``: see
        :class:`~.source_choice.CopyOffer`."""
        if self._why:
            return
        self._inside = True
        self._await_checksum()
        if self._before is not None and iteration > self.counts_from:
            old, self._before = self._before, None
            self._slots.remove_slots(lambda slot: slot is old)
        self._await_neighbour(iteration)
        if self._why or (not moving and not self._is_due(iteration)):
            return
        offer = CopyOffer(iteration, synchronized)
        try:
            if self._device_copier is not None:
                self._device_copier.finish_copy(WRITE_SECONDS)
            form, values, content = self._values.collect_state(unreported)
            slot = self._begin_slot(form, len(content))
        except (
            OSError, ValueError, TypeError, AttributeError, pickle.PicklingError, PipelineError
        ) as error:  # fmt: skip
            # Pickling may raise any but the first and last.
            self._stop_copying(error)
            return
        if self._device_copier is None:
            self._write_copy(slot, values, content, offer)
            return

        def write_copy(found: Mapping[str, Tensor]) -> None:
            """Write the copy, in another thread."""
            self._write_copy(slot, found, content, offer)

        try:
            self._device_copier.begin_copy(values, changes_within_iterations, write_copy)
        except RuntimeError as error:  # For example without page-locked memory.
            self._stop_copying(error)

    def _await_checksum(self) -> None:
        """Wait until the last copy has its checksum, since its file may be written next."""
        if self._summing is not None:
            self._summing.result()
            self._summing = None

    def _await_neighbour(self, iteration: int) -> None:
        """Wait until another pod has the newest copy from before ``iteration``. The host may rely
        on that for each iteration that was reported as finished."""
        neighbour = self._neighbour
        if neighbour is None:
            return
        if self._device_copier is not None:
            try:
                self._device_copier.finish_copy(WRITE_SECONDS)
            except PipelineError as error:
                self._stop_copying(error)
                return
        if neighbour.safe_iteration < neighbour.newest_offered < iteration:
            of = neighbour.newest_offered
            self._wait.waiting.begin_wait(f"another pod to receive its copy of iteration {of}")
            neighbour.await_safe(of)
            self._wait.waiting.end_wait()

    def _begin_slot(self, form: CopyForm, object_bytes: int) -> CopySlot:
        """Begin a slot; if memory is short, stop sending copies to another pod first."""
        try:
            return self._slots.begin_slot(form, object_bytes)
        except OSError as error:
            if self._neighbour is None or not self._slots.pinned:
                raise
            # No memory for both: a pinned copy must not prevent this rank's next copy.
            self._neighbour.end_rounds(str(error.strerror))
            self._slots.unpin_all()
            return self._slots.begin_slot(form, object_bytes)

    def _write_copy(
        self, slot: CopySlot, values: Mapping[str, Tensor], content: bytes, offer: CopyOffer
    ) -> None:
        assert slot.copy is not None
        slot.copy.begin_write()
        slot.copy.write_tensors(values)
        slot.copy.write_object(content)
        self._finish_copy(slot, offer)

    def _finish_copy(self, slot: CopySlot, offer: CopyOffer) -> None:
        """Finish the copy in a slot: mark it as whole, add its checksum, and offer it."""
        self._slots.finish_slot(slot, offer, self._part)
        assert slot.copy is not None
        if (
            self._device_copier is None
            and slot.copy.view_tensor_bytes().numel() > CHECKSUM_INLINE_BYTES
        ):
            self._summing = self._sums.submit(slot.copy.add_checksum)
        else:
            slot.copy.add_checksum()
        # No rank needs a copy to begin with iteration 0.
        if self._neighbour is not None and offer.iteration:
            self._neighbour.offer_copy(offer.iteration)

    def _stop_copying(self, error: Exception) -> None:
        """Stop making copies after an error, and remove the existing ones."""
        self._why = str(error.strerror if isinstance(error, OSError) else error)
        if self._neighbour is not None:
            self._neighbour.end_rounds("this rank makes none")
        self._remove_copies()
        self._report_unavailable()

    def seal_for_layout(self, iteration: int, *, exact: bool = True) -> str:
        """Finish the copy before an iteration for the next layout. ``exact``: all ranks of the next
        generation load their own. Returns the reason if there is no copy; else empty."""
        if self._device_copier is not None and not self._why:
            try:
                self._device_copier.finish_copy(WRITE_SECONDS)
            except PipelineError as error:
                self._stop_copying(error)
        self._await_checksum()
        slot = None if self._why else self._slots.find_newest(iteration)
        if slot is None:
            return self._why or f"it has no copy of iteration {iteration}"
        if not exact:
            return ""
        neighbour = self._neighbour
        if neighbour is not None and neighbour.newest_offered == iteration:
            # A pod may be lost during the trial of a new layout, in which no other copy is made.
            self._wait.waiting.begin_wait(
                f"another pod to receive its copy of iteration {iteration}"
            )
            neighbour.await_safe(iteration)
            self._wait.waiting.end_wait()
        assert slot.copy is not None and slot.offer is not None
        self._slots.finish_slot(slot, slot.offer, {**slot.copy.mark, "sealed_by": self._generation})
        return ""

    def remove_earlier_copies(self) -> None:
        """Remove all copies of an earlier run."""
        if not self._why:
            self._remove_copies()

    def _remove_copies(self) -> None:
        self._slots.remove_slots()
        self._held.remove_all()

    def set_first_iteration(self, iteration: int) -> None:
        """Set the first iteration of this generation, before which the state is copied as well."""
        if self._every:
            self._began_with = iteration

    def resume(self, saved: int = 0) -> ResumePoint | str:
        """Resume from copies. If that is not possible, returns the reason, removes all copies and
        changes nothing else. Collective over all ranks. ``saved``: the iteration of the newest
        checkpoint, which is preferred to older copies.

        Raises :class:`PipelineError` on all ranks if a chosen copy turns out to be unusable, or if
        the layout has just changed and some rank lacks its own copy. Then the copies stay, for a
        generation with the previous layout.
        """
        resuming = ResumeAgreement(
            self._folder, self._slots, self._held, self._values, world=self._world, wait=self._wait,
            part=self._part, state_keys=self._state_keys, generation=self._generation,
            place=self._place,
        )  # fmt: skip
        found = resuming.agree_on_sources(saved, self._why)
        state = found if isinstance(found, str) else resuming.obtain_state(found)
        if isinstance(found, str) or isinstance(state, str):
            self._remove_copies()
            return str(state)
        own = found.has_own_state(self._world.coordinate.rank)
        unreported = self._values.apply_state(state, own=own)
        slot, previous = self._slots.find_newest(found.iteration), resuming.previous_slot
        assert slot is not None and slot.copy is not None
        # Others are older, or of an iteration that runs again.
        self._slots.remove_others(slot, *([] if previous is None else [previous]))
        self._held.remove_other_iterations(found.iteration, resuming.split)
        if resuming.moved:
            self.counts_from = found.iteration + TRIAL_ITERATIONS
            self._before = previous if previous is not slot else None
        if isinstance(state, ComposedState):
            self._copy_new_shard(slot, found.iteration, unreported)
        if not own:
            # The copy has the random state of the other rank.
            self._values.capture_batch_state()
            slot.copy.begin_write()
            slot.copy.write_object(self._values.collect_state()[2])
            self._finish_copy(slot, CopyOffer(found.iteration))
        return ResumePoint(
            found.iteration,
            "kept" if found.all_local else "neighbour" if found.neighbours else "replica",
            describe_shortfall(found),
            unreported,
        )

    def _copy_new_shard(
        self, old: CopySlot, iteration: int, unreported: Sequence[IterationSample]
    ) -> None:
        """Copy the state of this rank's new part. The copy of its previous part stays until rank 0
        has ended the trial of the new layout: if a rank fails earlier, all resume from that.
        Collective over all ranks.

        Raises :class:`PipelineError` on all ranks if one of them cannot copy its state.
        """
        self._values.capture_batch_state()
        why = ""
        try:
            form, values, content = self._values.collect_state(unreported)
            slot = self._slots.begin_slot(form, len(content))
        except OSError as error:
            why = str(error.strerror)
        else:
            self._write_copy(slot, values, content, CopyOffer(iteration))
            self._slots.remove_others(old, slot)
            self._before = old
        for rank, each in enumerate(self._world.gather_all(why, str)):
            if each:
                raise PipelineError(f"rank {rank} cannot copy the state of its new part: {each}")


def _list_state_keys(
    world: World, placements: Iterable[TensorPlacement], *, shared: bool
) -> list[Hashable]:
    """List the coordinates that each rank's state depends on, by rank."""
    replicated: Collection[str] = set(DATA_DIMENSIONS) if shared else ()
    for spread in placements:
        replicated = set(replicated) & set(get_replicated_dimensions(spread))
    mesh = world.coordinate.mesh
    return [
        tuple(
            mesh.find_coordinate(rank).index_along(name)
            for name in DIMENSIONS
            if name not in replicated
        )
        for rank in range(dist.get_world_size(world.control))
    ]
