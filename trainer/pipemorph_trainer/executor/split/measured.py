"""What a stage's memory and backward cost, measured in the first iterations of the training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.split.flight import Flight, nodes_below
from pipemorph_trainer.executor.split.rerun import digest
from pipemorph_trainer.executor.torch_private import saved_tensors
from pipemorph_trainer.topology.placement import is_dtensor

if TYPE_CHECKING:
    from pipemorph_trainer.executor.offload.store import ActivationStore

MEASURABLE = 1e-3
"""Least seconds of a whole backward for its times to be used."""

MEASURED = 4
"""Least microbatches whose backwards are run for their times."""


class Measurements:
    """Sizes of the first microbatch, the time of a copy to host memory, and how much faster a whole
    backward is than B and W apart.

    For the latter, every other microbatch of the first iterations runs its backward whole, whatever
    the plan says, and the others apart. The first of each kind does not count.
    """

    def __init__(self, stage: nn.Module) -> None:
        tensors = [*stage.parameters(), *stage.buffers()]
        self._device = next((t.device for t in tensors if t.is_cuda), None)
        self._own = tensors
        self.sized = False
        """Whether the first microbatch was measured."""
        self.activation_bytes = 0
        """Bytes that autograd keeps for one microbatch after its F, without parameters."""
        self.input_bytes = 0
        """Bytes of the arguments of an F, which have to be kept to run it again."""
        self.copied_bytes = 0
        self.copy_seconds: float | None = None
        """Time to copy ``activation_bytes`` one way, the longer of both ways; None: not copied."""
        self.no_offload = ""
        """Why activations cannot be moved; empty if they can, or if it was not tried."""
        self.fused_ratio: float | None = None
        """Time of a whole backward divided by that of B and W; None if unknown, or too short."""
        self._seconds: dict[str, list[float]] = {"whole": [], "B": [], "W": []}
        self._microbatches = 0

    def size(self, flight: Flight, args: Sequence[Any], batch: Any) -> None:
        """Measure the first microbatch, after its F. ``batch``: the part of it that belongs to the
        caller's batch, which stays."""
        if self.sized:
            return
        self.sized = True
        given = map(_storage, (each for each in args if isinstance(each, Tensor)))
        self.input_bytes = sum({s.data_ptr(): s.nbytes() for s in given if s is not None}.values())
        others = [each for each in tree_leaves(batch) if isinstance(each, Tensor)]
        own = {s.data_ptr() for s in map(_storage, (*self._own, *others)) if s is not None}
        self._own = []
        recorded = () if flight.saved is None else (each() for each in flight.saved.saved)
        moved = (each.tensor for each in recorded if each is not None)
        found = [each for each in moved if each is not None]
        for node in nodes_below([out for out in flight.outputs if out.requires_grad]):
            found += saved_tensors(node)
        storages = {s.data_ptr(): s.nbytes() for s in map(_storage, found) if s is not None}
        self.activation_bytes = sum(n for at, n in storages.items() if at not in own)

    @property
    def tries_offload(self) -> bool:
        """Whether the next microbatch is the one that is copied."""
        return self.sized and self.copy_seconds is None and not self.no_offload

    def try_offload(self, flight: Flight, args: Sequence[Any], store: ActivationStore) -> None:
        """Move the activations of a microbatch to host memory and back: once to fill the pool, and
        once for the time. What comes back has to be what has left."""
        assert flight.saved is not None
        # Of these the caller still has the memory.
        beside = [
            each for each in (*flight.sent, *flight.outputs, *args) if isinstance(each, Tensor)
        ]
        before = [digest(each) for each in _current(flight)]
        for _ in range(2):
            began = self._now()
            try:
                self.copied_bytes = store.offload(flight.saved, flight.leaves, beside)
            except PipelineError as error:
                self.no_offload = str(error)
                return
            store.reclaim()
            between = self._now()
            store.fetch(flight.saved)
            seconds = max(between - began, self._now() - between)
        after = [digest(each) for each in _current(flight)]
        if len(before) != len(after) or not all(map(torch.equal, before, after)):
            raise PipelineError("activations came back from host memory with other values")
        self.copy_seconds = seconds

    # --- the backward -------------------------------------------------------------------------

    def whole(self, microbatches: int) -> Set[int] | None:
        """The microbatches of an iteration that begins whose backward is whole, for its time; None:
        all times are known. The same on all ranks of a stage."""
        first, self._microbatches = self._microbatches, self._microbatches + microbatches
        if first >= MEASURED:
            return None
        return frozenset(k for k in range(microbatches) if (first + k) % 2)

    @contextmanager
    def time(self, kind: str) -> Iterator[None]:
        """Time a ``whole`` backward, or its parts ``B`` and ``W``."""
        began = self._now()
        yield
        self._seconds[kind].append(self._now() - began)
        if min(map(len, self._seconds.values())) > 1:
            whole, first, second = (min(times[1:]) for times in self._seconds.values())
            self.fused_ratio = whole / (first + second) if whole > MEASURABLE else None

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _current(flight: Flight) -> list[Tensor]:
    assert flight.saved is not None
    found = [each() for each in flight.saved.saved]
    return [each.tensor for each in found if each is not None and each.tensor is not None]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    part: Tensor = cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor
    return part.untyped_storage() if part.layout is torch.strided else None
