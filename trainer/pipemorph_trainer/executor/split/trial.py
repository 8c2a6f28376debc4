"""Runs a stage over a few microbatches with one splitter, and records all results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.executor.split.digest import LOOSE, Digest
from pipemorph_trainer.executor.split.flight import Flight, StageCall
from pipemorph_trainer.executor.split.snapshot import Rerun, Snapshot, copy_tensors
from pipemorph_trainer.executor.split.splitters import Kept, Splitter

if TYPE_CHECKING:
    from pipemorph_trainer.executor.offload.store import ActivationStore


@dataclass(frozen=True)
class Sample:
    """One microbatch: the arguments of its F, and the output gradients of its B if it was called.
    Runs use copies."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    output_grads: Sequence[Tensor | None] | None = None

    def copy(self) -> Sample:
        return Sample(
            *copy_tensors(
                (tuple(self.args), dict(self.kwargs), self.target, self.output_grads),
            )
        )


@dataclass
class Outcome:
    """Digests of all results of a run, by readable names, and its times in seconds."""

    values: dict[str, Digest | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reruns: dict[str, int] = field(default_factory=dict)
    """Number of forward calls of submodules during W, by name: recomputation."""
    moved_bytes: int = 0
    """Bytes of the first microbatch that were moved to host memory and back."""


def run_trial(
    splitter: Splitter,
    call: StageCall,
    samples: Sequence[Sample],
    snapshot: Snapshot,
    *,
    fused: bool,
    store: ActivationStore | None = None,
    rerun: Rerun | None = None,
) -> Outcome:
    """Run F of all samples, then each B and W (or BW), from the state of the snapshot.

    W runs one B later, so that work of two microbatches is outstanding at once. With ``store`` the
    first microbatch is in host memory from its F to its B. With ``rerun`` each F runs again before
    its B. The caller must restore the stage.
    """
    snapshot.rewind()
    outcome = Outcome()
    timer = _Timer(outcome.seconds, call.module)
    flights: list[Flight] = []
    kept: list[Kept] = []
    given: list[tuple[Tensor | None, ...] | None] = []
    for index, sample in enumerate(samples):
        mine = sample.copy()
        goes = store is not None and index == 0
        recording = store.recording() if store is not None and goes else nullcontext()
        first = rerun.first() if rerun is not None else nullcontext()
        with recording as saved, first as begun, timer("F"):
            flight = splitter.forward(call, index, mine.args, mine.kwargs, mine.target)
        if begun is not None:
            kept.append(Kept(mine.args, mine.kwargs, mine.target, begun))
        # As in training, only the stage has references to its arguments.
        del mine
        flights.append(flight)
        for number, out in enumerate(flight.sent):
            what = "the loss" if call.is_last else f"output {number}"
            outcome.values[f"{what} of microbatch {index}"] = Digest.of(out)
        given.append(None if call.is_last else _output_grads(flight, sample, index))
        if store is not None and saved is not None:
            flight.saved = saved
            with timer("out"):
                outcome.moved_bytes = flight.leave(store, keep_outputs=call.is_last)
                store.reclaim()
        if rerun is not None:
            flights[index] = Flight(index)

    def weight(index: int) -> None:
        with count_calls(call.module, outcome.reruns), timer("W"):
            splitter.backward_weight(flights[index])

    for index in range(len(flights)):
        if rerun is not None:
            flights[index] = kept[index].run(splitter, call, index, rerun)
        flight = flights[index]
        if store is not None and flight.saved is not None:
            with timer("back"):
                store.fetch(flight.saved)
        with timer("BW" if fused else "B"):
            run = splitter.backward if fused else splitter.backward_input
            grads = run(flight, given[index])
        for number, grad in enumerate(grads):
            name = f"the gradient of input {number} of microbatch {index}"
            outcome.values[name] = _digest(grad)
        if not fused and index:
            weight(index - 1)
    if not fused:
        weight(len(flights) - 1)

    for name, parameter in call.module.named_parameters():
        outcome.values[f"the gradient of {name!r}"] = _digest(parameter.grad)
    for name, buffer in call.module.named_buffers():
        outcome.values[f"the buffer {name!r}"] = Digest.of(buffer)
    return outcome


def _digest(tensor: Tensor | None) -> Digest | None:
    return None if tensor is None else Digest.of(tensor)


def _output_grads(flight: Flight, sample: Sample, index: int) -> tuple[Tensor | None, ...]:
    """Output gradients of the microbatch. Random numbers replace missing gradients, and gradients
    that are all zero or not finite, which would hide errors of a split. They are the same in every
    run, and do not use the global random state."""
    generator = torch.Generator().manual_seed(20240 + index)
    grads: list[Tensor | None] = []
    for number, out in enumerate(flight.outputs):
        if not isinstance(out, Tensor) or not out.requires_grad:
            grads.append(None)
            continue
        if sample.output_grads is not None:
            came = sample.output_grads[number]
            if came is None or (came.any() and came.isfinite().all()):
                grads.append(None if came is None else came.clone())
                continue
        noise = torch.randn(out.shape, generator=generator, dtype=torch.float32)
        grads.append(noise.to(device=out.device, dtype=out.dtype))
    return tuple(grads)


class _Timer:
    """Measures the least seconds per kind of op; waits for the device around each op."""

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


def differences(
    expected: Outcome, actual: Outcome, loose: Sequence[str] = (), tolerance: float = 0.0
) -> list[str]:
    """Names of the values that are not bitwise equal. Those in ``loose`` are compared with
    :data:`LOOSE`, other gradients with ``tolerance``."""

    def allowed(name: str) -> float:
        if name in loose:
            return LOOSE
        return tolerance if name.startswith("the gradient") else 0.0

    return [
        name
        for name in {**expected.values, **actual.values}
        if not _same(expected.values.get(name), actual.values.get(name), allowed(name))
    ]


def _same(a: Digest | None, b: Digest | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    return a.close(b, tolerance) if tolerance else a.same(b)


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


def input_bytes(sample: Sample) -> int:
    """Bytes of the arguments of an F, which have to be kept to run it again. Keyword arguments and
    targets are those of the caller's batch, which stays."""
    seen: dict[int, int] = {}
    for arg in sample.args:
        if isinstance(arg, Tensor):
            storage = arg.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
