"""Costs of a stage's memory and backward, measured in the first iterations of the training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipemorph_trainer.autograd_internals import iterate_saved_tensors
from pipemorph_trainer.backward.forward_replay import digest_tensor
from pipemorph_trainer.backward.microbatch_state import MicrobatchState, iterate_graph_nodes
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology.placement import is_dtensor

if TYPE_CHECKING:
    from pipemorph_trainer.memory.activation_store import ActivationStore

MEASURABLE = 1e-3
"""Seconds of a whole backward below which its times are not used."""

MEASURED = 4
"""Number of microbatches, at least, whose backwards run for their times."""


class StageMeasurements:
    """Measurements: sizes of the first microbatch, the time of a copy to host memory, and the time
    of a whole backward relative to B and W apart.

    For the latter, every other microbatch of the first iterations runs its backward whole, whatever
    the plan, and the others apart. The first of each kind does not count.
    """

    def __init__(self, stage: nn.Module) -> None:
        tensors = [*stage.parameters(), *stage.buffers()]
        self._device = next((t.device for t in tensors if t.is_cuda), None)
        self._own = tensors
        self.sized = False
        """True if the first microbatch was measured."""
        self.activation_bytes = 0
        """Bytes that autograd saves for one microbatch in its F, without parameters."""
        self.input_bytes = 0
        """Bytes of the arguments of an F, which must stay on the device to run it again."""
        self.copied_bytes = 0
        self.copy_seconds: float | None = None
        """Seconds to copy ``activation_bytes`` one way, the slower direction; None: not copied."""
        self.offload_refusal = ""
        """Reason why activations cannot be moved; empty if they can, or if it was not tried."""
        self.fused_ratio: float | None = None
        """Time of a whole backward divided by that of B and W; None if unknown or too short."""
        self._seconds: dict[str, list[float]] = {"whole": [], "B": [], "W": []}
        self._microbatches = 0

    def measure_sizes(self, flight: MicrobatchState, args: Sequence[Any], batch: Any) -> None:
        """Measure the first microbatch, after its F. ``batch``: its part of the caller's batch,
        whose memory stays in use."""
        if self.sized:
            return
        self.sized = True
        given = map(_find_storage, (each for each in args if isinstance(each, Tensor)))
        self.input_bytes = sum({s.data_ptr(): s.nbytes() for s in given if s is not None}.values())
        others = [each for each in tree_leaves(batch) if isinstance(each, Tensor)]
        own = {s.data_ptr() for s in map(_find_storage, (*self._own, *others)) if s is not None}
        self._own = []
        recorded = () if flight.saved is None else (each() for each in flight.saved.saved)
        moved = (each.tensor for each in recorded if each is not None)
        found = [each for each in moved if each is not None]
        for node in iterate_graph_nodes([out for out in flight.outputs if out.requires_grad]):
            found += iterate_saved_tensors(node)
        storages = {s.data_ptr(): s.nbytes() for s in map(_find_storage, found) if s is not None}
        self.activation_bytes = sum(n for at, n in storages.items() if at not in own)

    @property
    def tries_offload(self) -> bool:
        """True if the next microbatch is the one to copy as a test."""
        return self.sized and self.copy_seconds is None and not self.offload_refusal

    def try_offload(
        self, flight: MicrobatchState, args: Sequence[Any], store: ActivationStore
    ) -> None:
        """Move the activations of a microbatch to host memory and back: once to fill the pool, and
        once for the time. Their values must not change."""
        assert flight.saved is not None
        # Tensors whose memory the caller still uses.
        in_use = [
            each for each in (*flight.sent, *flight.outputs, *args) if isinstance(each, Tensor)
        ]
        before = [digest_tensor(each) for each in _list_saved_tensors(flight)]
        for _ in range(2):
            began = self._read_synchronized_clock()
            try:
                self.copied_bytes = store.offload_activations(flight.saved, flight.leaves, in_use)
            except PipelineError as error:
                self.offload_refusal = str(error)
                return
            store.reclaim_memory()
            between = self._read_synchronized_clock()
            store.fetch_activations(flight.saved)
            seconds = max(between - began, self._read_synchronized_clock() - between)
        after = [digest_tensor(each) for each in _list_saved_tensors(flight)]
        if len(before) != len(after) or not all(map(torch.equal, before, after)):
            raise PipelineError("activations came back from host memory with other values")
        self.copy_seconds = seconds

    # --- the backward -------------------------------------------------------------------------

    def choose_whole_backwards(self, microbatches: int) -> Set[int] | None:
        """Choose the microbatches of a beginning iteration whose backward is whole, for its time;
        None: all times are known. Equal on all ranks of a stage."""
        first, self._microbatches = self._microbatches, self._microbatches + microbatches
        if first >= MEASURED:
            return None
        return frozenset(k for k in range(microbatches) if (first + k) % 2)

    @contextmanager
    def time_backward(self, kind: str) -> Iterator[None]:
        """Time a ``whole`` backward, or its parts ``B`` and ``W``."""
        began = self._read_synchronized_clock()
        yield
        self._seconds[kind].append(self._read_synchronized_clock() - began)
        if min(map(len, self._seconds.values())) > 1:
            whole, first, second = (min(times[1:]) for times in self._seconds.values())
            self.fused_ratio = whole / (first + second) if whole > MEASURABLE else None

    def _read_synchronized_clock(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _list_saved_tensors(flight: MicrobatchState) -> list[Tensor]:
    assert flight.saved is not None
    found = [each() for each in flight.saved.saved]
    return [each.tensor for each in found if each is not None and each.tensor is not None]


def _find_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    part: Tensor = cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor
    return part.untyped_storage() if part.layout is torch.strided else None
