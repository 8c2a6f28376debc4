"""Tells the ranks of a job that one of them has failed, where ops hold collectives.

A rank's neighbours see the end of its control socket. The ranks that run collectives with it inside
an op see nothing: they are in C++, until torch's timeout, unless its process ends and gloo sees
that. So a rank that fails says so in the store in which all ranks have met. A thread of each rank
looks there, and breaks the groups in which ops run their collectives: the op then ends with an
error, for which the one from the store is told.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from pipemorph.errors import PipeMorphError
from pipemorph_trainer.errors import PeerLostError, first_sentence
from pipemorph_trainer.topology.groups import abandon
from pipemorph_trainer.topology.placement import is_dtensor
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

LOOK_SECONDS = 0.5
"""Time from one look to the next, on at most 500 ranks; with more, rank 0 answers 1000 a second."""

ANSWER_SECONDS = 2.0
"""Longest wait for the store's answer after a failure."""
LINGER_SECONDS = 3.0
"""Longest time that rank 0 stays for others to look, beside that between two looks."""


class Failures:
    """The first failure of a job's ranks, told to all of them. Does nothing if no op of the job
    holds collectives: then connections tell.

    ``parameters``: of the stages of this rank. Ops may run collectives over the meshes of those
    that are distributed, and over that of the job, but for ``pp``.
    """

    def __init__(self, world: World, parameters: Iterable[Tensor]) -> None:
        self._coordinate = world.coordinate
        self._broken = self._told = self._knows = False
        self._every = max(LOOK_SECONDS, world.coordinate.mesh.world_size / 1000)
        self._looks, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if world.coordinate.mesh.lockstep == 1:
            return
        mesh: Any = world.mesh
        groups = {mesh.get_group(name) for name in mesh.mesh_dim_names or () if name != "pp"}
        for parameter in parameters:
            if is_dtensor(parameter):
                distributed: Any = parameter
                groups.update(distributed.device_mesh.get_all_groups())
        self._groups = [(group, dist.get_backend_config(group)) for group in groups]
        # The secret is new with each pipeline of a process group.
        self._key = f"pipemorph/failed/{hashlib.sha256(world.secret).hexdigest()[:16]}"
        # A connection of its own: one that waits for an answer blocks others on the same.
        self._store = _get_default_store().clone()
        self._thread = threading.Thread(target=self._watch, name="pipemorph-failures", daemon=True)
        self._thread.start()

    def heard(self) -> str | None:
        """The first failure that a rank has told of; None if there is none."""
        if self._thread is None:
            return None
        found: list[str | None] = []
        self._soon(lambda: found.append(self._first()))
        return found[0] if found else None

    def tell(self, error: BaseException) -> None:
        """Say that this rank has failed, unless one has said it before. The groups of this rank's
        ops are broken afterwards. Never raises."""
        if self._thread is None or self._told:
            return
        self._told = True
        text = str(error) if isinstance(error, PipeMorphError) else _named(error)
        if not text.startswith(str(self._coordinate)):
            text = f"{self._coordinate} failed: {text}"
        self._soon(lambda: (self._store.compare_set(self._key, "", text), self._first()))
        self.stop()
        self._break()

    def behind(self, error: Exception) -> PeerLostError | None:
        """The failure of another rank behind an error of this one; None if none has told of any."""
        if self._thread is None or self._told:
            return None
        first = self.heard()
        if first is None:
            return None
        text = str(error) if isinstance(error, PipeMorphError) else _named(error)
        return PeerLostError(text if first in text else f"{first}; {self._coordinate}: {text}")

    def stop(self) -> None:
        """Look no longer. Idempotent."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(ANSWER_SECONDS)

    def _watch(self) -> None:
        while not self._end.wait(self._every):
            try:
                first = self._first()
            except RuntimeError as error:
                log.info("%s: failures are told no more: %s", self._coordinate, error)
                return
            if first is not None:
                log.info("%s: %s", self._coordinate, first)
                self._break()
                return

    def _soon(self, ask: Callable[[], object]) -> None:
        """Ask the store something, for :data:`ANSWER_SECONDS` at most: its host may be stopped, or
        gone, which its neighbours tell."""

        def asking() -> None:
            try:
                ask()
            except RuntimeError as error:
                log.info("%s: no failure is told: %s", self._coordinate, error)

        thread = threading.Thread(target=asking, name="pipemorph-failure", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)

    def linger(self) -> None:
        """On rank 0, which has the store: wait after a failure until all ranks know of it, for a
        few seconds at most, as some may have ended."""
        if self._coordinate.rank != 0 or not self._knows:
            return
        until = monotonic() + LINGER_SECONDS + self._every
        with suppress(RuntimeError):
            while monotonic() < until and not self._all_know():
                sleep(0.05)

    def _all_know(self) -> bool:
        return self._store.add(f"{self._key}/known", 0) >= self._coordinate.mesh.world_size

    def _first(self) -> str | None:
        """The first failure, in the store. Raises :class:`RuntimeError` if that does not answer."""
        with self._looks:
            if not self._store.check([self._key]):
                return None
            if not self._knows:
                self._knows = True
                self._store.add(f"{self._key}/known", 1)
            return self._store.get(self._key).decode()

    def _break(self) -> None:
        """Have every collective in progress inside an op end with an error."""
        if not self._broken:
            self._broken = True
            for group, backends in self._groups:
                abandon(group, backends)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_sentence(error)}" if str(error) else repr(error)
