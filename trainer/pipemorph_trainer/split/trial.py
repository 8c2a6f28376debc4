"""Runs a stage over a few microbatches with one splitter and notes all that came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.split.flight import Flight, StageCall
from pipemorph_trainer.split.snapshot import Snapshot, copy_tensors, map_tensors
from pipemorph_trainer.split.splitters import Splitter

if TYPE_CHECKING:
    from pipemorph_trainer.offload.store import ActivationStore


@dataclass(frozen=True)
class Sample:
    """One microbatch: what F is called with. Only ever handed out as copies."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any

    def copy(self) -> Sample:
        return Sample(*copy_tensors((tuple(self.args), dict(self.kwargs), self.target)))

    def flipped(self) -> Sample:
        """A second microbatch of the same shapes: every tensor reversed along its batch."""

        def flip(tensor: Tensor) -> Tensor:
            return tensor.detach().flip(0) if tensor.dim() else tensor.detach()

        return Sample(*map_tensors((tuple(self.args), dict(self.kwargs), self.target), flip))


@dataclass
class Outcome:
    """Every value a run produced, by a name people can read, and its times in seconds."""

    values: dict[str, Tensor | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    held_bytes: int | None = None
    reruns: dict[str, int] = field(default_factory=dict)
    """Forward calls of submodules during W, by name: recomputation."""
    moved_bytes: int = 0
    """Of the first microbatch, to host memory and back."""


def run_trial(
    splitter: Splitter,
    call: StageCall,
    samples: Sequence[Sample],
    snapshot: Snapshot,
    *,
    fused: bool,
    store: ActivationStore | None = None,
) -> Outcome:
    """F of all samples, then each B and W (or BW), from the state of the snapshot.

    W runs one B behind, so that work of two microbatches is outstanding at once. With
    ``store`` the first microbatch is in host memory from its F to its B. Leaves the stage as
    the run did; the caller restores.
    """
    snapshot.rewind()
    outcome = Outcome()
    timer = _Timer(outcome.seconds, call.module)
    flights: list[Flight] = []
    given: list[tuple[Tensor | None, ...] | None] = []
    for index, sample in enumerate(samples):
        mine = sample.copy()
        goes = store is not None and index == 0
        recording = store.recording() if store is not None and goes else nullcontext()
        with recording as saved, timer("F"):
            flight = splitter.forward(call, index, mine.args, mine.kwargs, mine.target)
        # Nobody but the stage holds its arguments: so it is in training.
        del mine
        flights.append(flight)
        for number, out in enumerate(flight.sent):
            what = "the loss" if call.is_last else f"output {number}"
            outcome.values[f"{what} of microbatch {index}"] = out.clone()
        given.append(None if call.is_last else _output_grads(flight, index))
        if store is not None and saved is not None:
            flight.saved = saved
            with timer("out"):
                outcome.moved_bytes = flight.leave(store, keep_outputs=call.is_last)
                store.settle()

    def weight(index: int) -> None:
        with count_calls(call.module, outcome.reruns), timer("W"):
            splitter.backward_weight(flights[index])

    for index, flight in enumerate(flights):
        if store is not None and flight.saved is not None:
            with timer("back"):
                store.fetch(flight.saved)
        with timer("BW" if fused else "B"):
            run = splitter.backward if fused else splitter.backward_input
            grads = run(flight, given[index])
        for number, grad in enumerate(grads):
            name = f"the gradient of input {number} of microbatch {index}"
            outcome.values[name] = None if grad is None else grad.clone()
        if not fused:
            if outcome.held_bytes is None:
                outcome.held_bytes = getattr(splitter, "held_bytes", lambda _: 0)(flight)
            if index:
                weight(index - 1)
    if not fused:
        weight(len(flights) - 1)

    for name, parameter in call.module.named_parameters():
        outcome.values[f"the gradient of {name!r}"] = parameter.grad
    for name, buffer in call.module.named_buffers():
        outcome.values[f"the buffer {name!r}"] = buffer.detach().clone()
    return outcome


def _output_grads(flight: Flight, index: int) -> tuple[Tensor | None, ...]:
    """Random gradients, the same for every run and without touching the random state."""
    generator = torch.Generator().manual_seed(20240 + index)
    grads: list[Tensor | None] = []
    for out in flight.outputs:
        if not isinstance(out, Tensor) or not out.requires_grad:
            grads.append(None)
            continue
        noise = torch.randn(out.shape, generator=generator, dtype=torch.float32)
        grads.append(noise.to(device=out.device, dtype=out.dtype))
    return tuple(grads)


class _Timer:
    """Least seconds per kind of op; waits for the device around each op."""

    def __init__(self, into: dict[str, float], stage: nn.Module) -> None:
        self._into = into
        first = next((t for t in [*stage.parameters(), *stage.buffers()]), None)
        self._wait: Callable[[], None] = lambda: None
        if first is not None and first.device.type == "cuda":
            self._wait = partial(torch.cuda.synchronize, first.device)

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        seconds = time.perf_counter() - start
        self._into[kind] = min(seconds, self._into.get(kind, seconds))


@contextmanager
def count_calls(stage: nn.Module, into: dict[str, int]) -> Iterator[None]:
    """Count forward calls of every submodule by name."""

    def counter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            into[name] = into.get(name, 0) + 1

        return hook

    handles = [
        module.register_forward_pre_hook(counter(name)) for name, module in stage.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def differences(expected: Outcome, actual: Outcome, loose: Sequence[str] = ()) -> list[str]:
    """Names of the values that are not equal to the bit; those in ``loose`` by tolerance."""
    return [
        name
        for name in {**expected.values, **actual.values}
        if not _same(expected.values.get(name), actual.values.get(name), name in loose)
    ]


def _same(a: Tensor | None, b: Tensor | None, loose: bool) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = _local(a), _local(b)
    if a.layout is not torch.strided or b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if loose:
        scale = float(a.abs().max()) if a.numel() else 0.0
        return torch.allclose(a, b, rtol=1e-2, atol=1e-2 * scale, equal_nan=True)
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124 - NaN equals NaN here


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, which not every torch can compare."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def activation_bytes(call: StageCall, sample: Sample, snapshot: Snapshot) -> int | None:
    """Bytes autograd keeps for one microbatch after F, parameters and buffers left out.

    None where the stage does not run under saved-tensor hooks.
    """
    seen: dict[int, int] = {}
    kept: list[Tensor] = []
    own: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        alias = tensor.detach()
        storage = alias.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            kept.append(alias)
        return alias

    snapshot.rewind()
    mine = sample.copy()
    try:
        own.update(
            tensor.untyped_storage().data_ptr()
            for tensor in [*call.module.parameters(), *call.module.buffers()]
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda alias: alias):
            call(0, mine.args, mine.kwargs, mine.target)
    except (RuntimeError, NotImplementedError):
        return None
    return sum(seen.values())
