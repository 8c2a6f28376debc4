"""Broadcasts a rank's failure to all ranks of a job whose ops contain collectives.

A rank's neighbours notice that its control socket closes. Ranks that run collectives with it inside
an op do not: they wait in C++ until torch's timeout, unless its process ends and gloo notices. So a
failing rank writes its error to the store of the process group. A thread of each rank polls the
store and aborts the groups in which ops run collectives. The op then ends with an error, and the
error from the store is reported in its place.
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
from pipemorph_trainer.topology.groups import abort_group
from pipemorph_trainer.topology.placement import is_dtensor
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

POLL_SECONDS = 0.5
"""Polling interval on at most 500 ranks. With more, rank 0 answers 1000 requests a second."""

ANSWER_SECONDS = 2.0
"""Timeout for an answer of the store after a failure."""
LINGER_SECONDS = 3.0
"""Longest time that rank 0, besides a polling interval, waits for other ranks to read a failure."""


class FailureBroadcast:
    """Broadcasts the first failure of a rank to all ranks. Does nothing if no op of the job
    contains collectives: connections then show the failure.

    ``parameters``: of this rank's stages. Ops may run collectives over the meshes of distributed
    parameters, and over the job's mesh except ``pp``.
    """

    def __init__(self, world: World, parameters: Iterable[Tensor]) -> None:
        self._coordinate = world.coordinate
        self._broken = self._reported = self._has_read = False
        self._every = max(POLL_SECONDS, world.coordinate.mesh.world_size / 1000)
        self._store_lock, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if world.coordinate.mesh.lockstep_size == 1:
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
        # A separate connection: a request blocks others on the same connection.
        self._store = _get_default_store().clone()
        self._thread = threading.Thread(
            target=self._watch_store, name="pipemorph-failures", daemon=True
        )
        self._thread.start()

    def read_failure(self) -> str | None:
        """Read the first failure that a rank has reported; None if there is none."""
        if self._thread is None:
            return None
        found: list[str | None] = []
        self._call_store(lambda: found.append(self._read_first_failure()))
        return found[0] if found else None

    def report_failure(self, error: BaseException) -> None:
        """Report that this rank has failed, unless another failure was reported first. Then abort
        the groups of this rank's ops. Never raises."""
        if self._thread is None or self._reported:
            return
        self._reported = True
        text = str(error) if isinstance(error, PipeMorphError) else _format_error(error)
        if not text.startswith(str(self._coordinate)):
            text = f"{self._coordinate} failed: {text}"
        self._call_store(
            lambda: (self._store.compare_set(self._key, "", text), self._read_first_failure())
        )
        self.stop()
        self._break_groups()

    def find_cause(self, error: Exception) -> PeerLostError | None:
        """Return another rank's failure as the cause of an error; None if none was reported."""
        if self._thread is None or self._reported:
            return None
        first = self.read_failure()
        if first is None:
            return None
        text = str(error) if isinstance(error, PipeMorphError) else _format_error(error)
        return PeerLostError(text if first in text else f"{first}; {self._coordinate}: {text}")

    def stop(self) -> None:
        """End polling. Idempotent."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(ANSWER_SECONDS)

    def _watch_store(self) -> None:
        """Poll the store in a thread until a rank reports a failure."""
        while not self._end.wait(self._every):
            try:
                first = self._read_first_failure()
            except RuntimeError as error:
                log.info("%s: failures of ranks are not read any more: %s", self._coordinate, error)
                return
            if first is not None:
                log.info("%s: %s", self._coordinate, first)
                self._break_groups()
                return

    def _call_store(self, request: Callable[[], object]) -> None:
        """Send a request to the store; wait :data:`ANSWER_SECONDS` at most, since its host may be
        stopped or gone."""

        def run_call() -> None:
            try:
                request()
            except RuntimeError as error:
                log.info("%s: the store of failures does not answer: %s", self._coordinate, error)

        thread = threading.Thread(target=run_call, name="pipemorph-failure", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)

    def await_readers(self) -> None:
        """Wait on rank 0, which serves the store, until all ranks have read a failure; at most a
        few seconds, since some ranks may have ended."""
        if self._coordinate.rank != 0 or not self._has_read:
            return
        until = monotonic() + LINGER_SECONDS + self._every
        with suppress(RuntimeError):
            while monotonic() < until and not self._have_all_read():
                sleep(0.05)

    def _have_all_read(self) -> bool:
        return self._store.add(f"{self._key}/known", 0) >= self._coordinate.mesh.world_size

    def _read_first_failure(self) -> str | None:
        """Read the first failure; None if there is none. Raises :class:`RuntimeError` if the store
        does not answer."""
        with self._store_lock:
            if not self._store.check([self._key]):
                return None
            if not self._has_read:
                self._has_read = True
                self._store.add(f"{self._key}/known", 1)
            return self._store.get(self._key).decode()

    def _break_groups(self) -> None:
        """Abort every collective in progress inside an op, which then ends with an error."""
        if not self._broken:
            self._broken = True
            for group, backends in self._groups:
                abort_group(group, backends)


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_sentence(error)}" if str(error) else repr(error)
