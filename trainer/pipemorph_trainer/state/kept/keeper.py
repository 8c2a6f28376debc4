"""Keeps a rank's state in shared memory, for the ranks that come after it.

When a rank dies, the host ends all ranks of the job and starts new ones: another *generation*.
Optimizers step at different moments on different ranks, so that at any time some ranks may stand
before an iteration and some in it. But no rank can end an iteration that another has not begun. So
each rank has two copies, of its state before each of the last two iterations that it has begun, and
of one iteration all ranks have one. A rank writes them itself, before it begins the iteration. They
are in files of the host's in memory, and outlive a process that is killed at any moment.

A rank whose memory is gone too, with its machine or pod, takes the copy of another that holds the
same part of the model: of another replica.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import pickle
import re
import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from pipemorph.api.mesh import DATA, DIMENSIONS
from pipemorph.wire import IterationSample
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.state.gradients import levelled_over
from pipemorph_trainer.state.kept.choice import Choice, Offer, choose
from pipemorph_trainer.state.kept.copies import Copy, remove, room
from pipemorph_trainer.state.kept.exchange import receive, send
from pipemorph_trainer.state.kept.values import Values
from pipemorph_trainer.topology.placement import Placement
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

Rung = Literal["kept", "replica", "checkpoint", "beginning"]
"""Where the state of a generation comes from: the ranks' own copies, some of other replicas', a
checkpoint, or nowhere."""

LOCK_SECONDS = 10.0
"""Longest wait for the process that was this rank before to end."""
_OWN = re.compile(r"rank-(\d+)\.generation-(\d+)")

_numbers = itertools.count(1)
"""Of the pipelines of this process."""


class Resumed(NamedTuple):
    """Where the state of this generation comes from. ``why``: why not from a newer iteration, or
    from a higher rung; empty if there was none."""

    iteration: int
    rung: Rung
    why: str = ""
    unreported: Sequence[IterationSample] = ()
    """Earlier iterations that may not have been reported."""

    def __str__(self) -> str:
        told = {
            "kept": f"went on with iteration {self.iteration} from its ranks' memory",
            "replica": f"went on with iteration {self.iteration} from memory of other replicas",
            "checkpoint": f"resumed from the checkpoint of iteration {self.iteration}",
            "beginning": "began from the beginning",
        }[self.rung]
        return f"{told} ({self.why})" if self.why else told


class _Told(NamedTuple):
    """What a rank tells of its copies. ``size``: bytes of the largest; ``room``: that it has."""

    mesh: str
    offers: tuple[Offer, ...]
    size: int
    room: int
    reason: str


class Keeper:
    """The copies of this rank's state, in ``folder``. Main thread only.

    They are in a subfolder ``rank-<RANK>.generation-<G>``, which every generation takes over.
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
    ) -> None:
        self._number = next(_numbers)
        self._values, self._world, self._wait = values, world, wait
        self._paths: list[Path] = []
        self._slots = _slots(world, placements, shared=values.shared)
        self._copies: list[Copy | None] = [None, None]
        self._newest = 0
        """Index of the copy that was written last."""
        self._why = values.refusal() or self._open(folder, generation)
        """Why this rank keeps nothing; empty if it does."""
        self._inside = False
        """Whether an iteration runs, in which a step may be taken again."""
        if self._why:
            self._tell()
        elif values.optimizer is not None:
            # It may draw random numbers, such as for stochastic rounding.
            values.optimizer.register_step_post_hook(self._after_step)

    def _open(self, folder: Path, generation: int) -> str:
        """Take over this rank's subfolder, or make one. Returns why that is not possible."""
        rank = self._world.coordinate.rank
        mine = folder / f"rank-{rank}.generation-{generation}"
        try:
            found = {
                int(match[2]): path
                for path in folder.iterdir()
                if (match := _OWN.fullmatch(path.name)) and int(match[1]) == rank
            }
            path = found[max(found)] if found else mine
            path.mkdir(mode=0o700, exist_ok=True)
            why = self._lock(path / "lock")
            if not why and path != mine:
                path.rename(mine)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        self._paths = [mine / "a", mine / "b"]
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
        log.warning("%s keeps no state in memory: %s", self._world.coordinate, self._why)

    def mark(self) -> None:
        """Say that an iteration is over, and the batch of the next one has not been drawn yet."""
        self._inside = False
        if not self._why:
            self._values.mark()

    def _after_step(self, *_: Any) -> None:
        if not self._inside and not self._why:
            self._values.mark_random()

    def begin(
        self,
        iteration: int,
        unreported: Sequence[IterationSample],
        *,
        synchronized: bool,
        pending: bool,
    ) -> None:
        """Copy the state before an iteration. ``unreported``: iterations that have not been
        reported. ``synchronized``, ``pending``: see :class:`~.choice.Offer`."""
        if self._why:
            return
        self._inside = True
        index = 1 - self._newest
        offer = Offer(iteration, "pending" if pending else "final", synchronized)
        try:
            form, values, content = self._values.take(unreported)
            copy = self._copies[index]
            if copy is None or not copy.fits(form, len(content)):
                self._copies[index] = None
                copy = self._copies[index] = Copy.create(self._paths[index], form, len(content))
        except (OSError, ValueError, TypeError, AttributeError, pickle.PicklingError) as error:
            # Of pickling: any of the last four.
            self._stop(error)
            return
        copy.begin()
        copy.write(values)
        copy.write_object(content)
        copy.finish(self._mark_of(offer))
        self._newest = index

    def _mark_of(self, offer: Offer) -> dict[str, Any]:
        mesh = self._world.coordinate.mesh.described()
        return {"offer": list(offer), "mesh": mesh, "pipeline": self._number}

    def _stop(self, error: Exception) -> None:
        self._why = str(error.strerror if isinstance(error, OSError) else error)
        self._remove()
        self._tell()

    def clear(self) -> None:
        """Remove all copies, which an earlier run has left."""
        if not self._why:
            self._remove()

    def _remove(self) -> None:
        self._copies = [None, None]
        for path in self._paths:
            remove(path)

    def _pending(self) -> tuple[Copy, Offer] | None:
        """The newest copy, if the optimizer's step before it was not known to stand."""
        copy = self._copies[self._newest]
        if copy is None or not copy.whole:
            return None
        offer = Offer(*copy.mark["offer"])
        return (copy, offer) if offer.step == "pending" else None

    def stood(self) -> None:
        """Say that the optimizer's step before this iteration stands as it was taken."""
        found = self._pending()
        if found is not None:
            copy, offer = found
            copy.finish(self._mark_of(offer._replace(step="early")))

    def taken_again(self) -> None:
        """Copy what the optimizer's step before this iteration has changed, which was taken
        again."""
        found = self._pending()
        if found is None:
            return
        copy, offer = found
        copy.begin()
        values, content = self._values.take_step()
        copy.write(values)
        copy.write_object(content)
        copy.finish(self._mark_of(offer._replace(step="final")))

    def resume(self) -> Resumed | str:
        """Go on with the state that was kept; or why that is not possible, and then nothing is
        changed and all copies are removed. Collective over all ranks.

        Raises :class:`PipelineError` on all ranks if a copy cannot be used after all.
        """
        told = self._world.tell_all(self._told())
        found = self._choose(told)
        if isinstance(found, str):
            self._remove()
            return found
        rank, control = self._world.coordinate.rank, self._world.control
        source = found.sources[rank]
        # In one order on all ranks, so that no two wait for each other.
        for to, other in enumerate(found.sources):
            if other == rank != to:
                self._wait.waiting.begin(f"rank {to} to take its state")
                send(self._of(found.iteration), to, control, self._wait)
                self._wait.waiting.end()
            elif to == rank != other:
                self._wait.waiting.begin(f"its state from rank {other}")
                self._take(other)
                self._wait.waiting.end()
        copy = self._of(found.iteration)
        misfit = self._values.misfit(copy.form, copy.object)
        for each, why in enumerate(self._world.tell_all(misfit)):
            if why:
                self._remove()
                return f"the kept state of rank {each} does not fit its stage: {why}"
        unreported = self._values.apply(copy, own=source == rank)
        if source != rank:
            # It has the random state of the other rank.
            self._values.mark()
            copy.begin()
            copy.write_object(self._values.take()[2])
            copy.finish(self._mark_of(Offer(found.iteration)))
        # The other is older, or of an iteration that runs again.
        self._copies[1 - self._newest] = None
        remove(self._paths[1 - self._newest])
        return Resumed(
            found.iteration,
            "kept" if found.exact else "replica",
            self._inexact(found) or found.why_not_newer,
            unreported,
        )

    def _told(self) -> _Told:
        if self._why:
            return _Told("", (), 0, 0, self._why)
        offers, size, mesh = [], 0, self._world.coordinate.mesh.described()
        for index, path in enumerate(self._paths):
            copy = Copy.open(path)
            if copy is None or not copy.whole:
                continue
            mark = copy.mark
            if (mark["mesh"], mark["pipeline"]) != (mesh, self._number):
                continue
            self._copies[index] = copy
            offers.append(Offer(*mark["offer"]))
            size = max(size, path.stat().st_size)
        return _Told(mesh, tuple(offers), size, room(self._paths[0]), "")

    def _choose(self, told: Sequence[_Told]) -> Choice | str:
        found = choose([each.offers for each in told], self._slots)
        if isinstance(found, str):
            reasons = [f"rank {r}: {each.reason}" for r, each in enumerate(told) if each.reason]
            return "; ".join([found, *reasons[:1]])
        for rank, source in enumerate(found.sources):
            if rank != source and told[source].size > told[rank].room // 2:
                return (
                    f"rank {rank} has no memory for its state: it takes {told[source].size:,} bytes"
                    f" of the {told[rank].room:,} that are left"
                )
        return found

    def _of(self, iteration: int) -> Copy:
        """The copy of an iteration, which is the newest from now on."""
        for index, copy in enumerate(self._copies):
            if copy is None or not copy.whole:
                continue
            if Offer(*copy.mark["offer"]).iteration == iteration:
                self._newest = index
                return copy
        raise PipelineError(f"{self._world.coordinate} has no copy of iteration {iteration}")

    def _take(self, source: int) -> None:
        """Take a copy from another rank, in place of one that is of no use."""
        index = next((i for i, copy in enumerate(self._copies) if copy is None), 0)
        self._copies[index] = None
        copy, mark = receive(self._paths[index], source, self._world.control, self._wait)
        copy.finish(mark)
        self._copies[index] = copy

    def _inexact(self, choice: Choice) -> str:
        """What is not as it was if ranks took the state of others."""
        ranks = [str(rank) for rank, source in enumerate(choice.sources) if rank != source]
        if not ranks:
            return ""
        return (
            f"of rank {', '.join(ranks)} nothing was left: random state is new there, and what"
            " state= has is another replica's"
        )


def leave_word(folder: Path, generation: int, resumed: Resumed) -> None:
    """Write where the state of this generation comes from, for the host:
    ``resumed.generation-<G>``, JSON."""
    path = folder / f"resumed.generation-{generation}"
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(json.dumps(resumed._replace(unreported=())._asdict()))
        unfinished.rename(path)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)


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
