"""One stage's F, B and W, in microbatch order, for the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split.asked import asked_for
from pipemorph_trainer.executor.split.flight import (
    Flight,
    Grads,
    LossFn,
    StageCall,
    find_clone_inputs,
)
from pipemorph_trainer.executor.split.report import Mode, OrderError, Split, SplitReport
from pipemorph_trainer.executor.split.self_test import SelfTest
from pipemorph_trainer.executor.split.snapshot import copy_tensors
from pipemorph_trainer.executor.split.splitters import Splitter
from pipemorph_trainer.executor.split.trial import Sample

if TYPE_CHECKING:
    from pipemorph_trainer.executor.offload.store import ActivationStore

SAMPLES = 2
"""Microbatches of the first iteration that are kept for the self-test: so many have work
outstanding at once in it."""


class StageRunner:
    """Wraps any ``nn.Module`` stage; one per rank and stage.

    F, B and W each run in microbatch order 0 … N-1, then the next iteration starts at 0
    again. A microbatch is either split (:meth:`backward_input`, then
    :meth:`backward_weight`) or fused (:meth:`backward`). Since W runs in microbatch order
    too, every ``.grad`` is to the bit what a sequential run of the microbatches leaves.

    With ``auto`` the first iteration is fused, and :meth:`self_test` at its end chooses how the
    following ones are split. On a fused stage :meth:`backward_input` is the whole backward and
    :meth:`backward_weight` is empty, so a plan with B and W runs on any stage.

    Args:
        module: the stage. Its class, names and ``state_dict`` stay as they are.
        is_first: inputs are data: they get no gradient.
        is_last: the output goes to ``loss_fn`` (None: the module returns its loss).
        microbatches: N; the loss is divided by it before the backward.
        mode: ``auto``, or the one split to use, at once and without a test.
        store: where activations go in host memory; None: they stay on the device.

    Raises :class:`SplitError` if the stage's modules rule out the split that was asked for.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        is_first: bool,
        is_last: bool,
        loss_fn: LossFn | None = None,
        microbatches: int,
        mode: Mode = "auto",
        store: ActivationStore | None = None,
    ) -> None:
        if microbatches < 1:
            raise SplitError(f"microbatches is {microbatches}; expected at least 1")
        if loss_fn is not None and not is_last:
            raise SplitError("loss_fn is for the last stage only")
        self.module = module
        self.microbatches = microbatches
        self.mode: Mode = mode
        self.report: SplitReport | None = None
        self._store = store
        self._call = StageCall(
            module,
            is_first=is_first,
            is_last=is_last,
            loss_fn=loss_fn,
            microbatches=microbatches,
        )
        self._splitter: Splitter = Splitter()
        if mode != "auto":
            self._splitter, self.report = asked_for(mode, module)
        self._samples: list[Sample] = []
        """Copies of the first microbatches, until the self-test."""
        self._has_run = False
        self._plain = Splitter()
        if not is_last:
            # What torch imports when it is first given gradients takes seconds: here on all ranks
            # at once, in the first iteration on one after the other.
            torch.autograd.backward([torch.zeros(1, requires_grad=True) * 1], [torch.ones(1)])
        self._only_fused = False
        self._flights: dict[int, Flight] = {}
        self._next = {"F": 0, "B": 0, "W": 0}

    @property
    def split(self) -> Split:
        """How this stage splits its backward now."""
        return self._splitter.split

    @property
    def reason(self) -> str:
        """Why it does so."""
        return "the self-test has not run" if self.report is None else self.report.reason

    @property
    def in_flight(self) -> int:
        """Microbatches whose F has started and whose W has not finished."""
        return len(self._flights)

    def begin_iteration(self, *, only_fused: bool) -> None:
        """Say before the first F whether this iteration's backwards are all fused (op BW).

        Then F runs as torch has it: what a split adds to F (some percent of a small stage)
        would be for nothing. Raises :class:`SplitError` with microbatches in flight.
        """
        if self._flights:
            raise SplitError(f"a new iteration with {len(self._flights)} microbatches in flight")
        self._only_fused = only_fused
        if self._store is not None:
            self._store.reclaim()

    @property
    def _active(self) -> Splitter:
        return self._plain if self._only_fused else self._splitter

    @property
    def untested(self) -> bool:
        """Whether :meth:`self_test` is still to choose the split."""
        return self.report is None

    def self_test(self, samples: Sequence[Sample] = ()) -> SplitReport:
        """Choose the split by trying it on the stage itself with real microbatches: by default
        the first two that it has run in training, which it keeps copies of for that.

        Runs the stage several times on copies of them and compares, bitwise, every
        output, input gradient, parameter gradient and buffer of split and unsplit runs over
        two microbatches. Tries module, then graph, else stays fused. Leaves
        parameters, gradients, buffers and the random state as they were.

        A split that ``mode`` asked for is not tried: its report is there. Raises
        :class:`SplitError` if microbatches are in flight, or if there are no samples.
        """
        if self.mode != "auto" and self.report is not None:
            return self.report
        if self._flights:
            raise SplitError(f"self-test with {len(self._flights)} microbatches in flight")
        samples = samples or self._samples
        if not samples:
            raise SplitError("self-test before the first iteration, so without a microbatch")
        self._splitter, self.report = SelfTest(self._call, samples, self._store).run()
        self._samples = []
        return self.report

    def forward(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        *,
        offload: bool = False,
    ) -> tuple[Tensor, ...]:
        """F. Returns the outputs to send, detached; on the last stage ``(loss,)``, the loss
        of this microbatch before the division by N.

        ``args`` must not change before W of this microbatch: autograd keeps them. With
        ``offload``, :meth:`offload` may follow.
        """
        self._expect("F", microbatch)
        if self.untested and len(self._samples) == microbatch < SAMPLES:
            self._samples.append(Sample(args, kwargs or {}, target).copy())
        if offload:
            with self._storing().recording() as saved:
                flight = self._forward(microbatch, args, kwargs, target)
            flight.saved = saved
        else:
            flight = self._forward(microbatch, args, kwargs, target)
        self._flights[microbatch] = flight
        self._next["F"] += 1
        sent = flight.sent
        if not offload:
            flight.sent = ()
        return sent

    def _forward(
        self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None, target: Any
    ) -> Flight:
        def run() -> Flight:
            return self._active.forward(self._call, microbatch, args, kwargs, target)

        flight = run() if self._has_run else find_clone_inputs(self._call, run)
        self._has_run = True
        return flight

    def offload(self, microbatch: int) -> int:
        """Move what the F of ``microbatch``, the newest, has left to host memory, and give up
        its memory on the device; returns the bytes moved. :meth:`fetch` before its B.

        Parameters, buffers and whatever somebody else holds as well stay: the caller should
        hold the arguments of that F no longer. Raises :class:`SplitError` if that F was not
        run for it, :class:`PipelineError` if there is no room.
        """
        flight = self._flights[microbatch]
        if flight.saved is None:
            raise SplitError(f"F{microbatch} was not run with offload; its tensors are not known")
        return flight.leave(self._storing(), keep_outputs=self._call.is_last)

    def reclaim(self) -> None:
        """Have the device wait for what is still leaving; an F with ``offload`` does so too."""
        self._storing().reclaim()

    def fetch(self, microbatch: int) -> int:
        """Bring what :meth:`offload` moved back to the device; returns the bytes moved."""
        flight = self._flights[microbatch]
        if flight.saved is None or flight.saved.block is None:
            raise OrderError(f"the activations of microbatch {microbatch} are not in host memory")
        return self._storing().fetch(flight.saved)

    def _storing(self) -> ActivationStore:
        if self._store is None:
            raise SplitError(
                "this stage has no host memory for activations; give adaptation.hostMemory"
                " (host_memory of Pipeline)"
            )
        return self._store

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """B. ``output_grads`` matches F's outputs, None entries where there is no gradient;
        on the last stage leave it out.

        Returns one gradient per positional argument of F: None for arguments that are not
        floating-point, that the stage did not use, and on the first stage. The gradients
        given must not change before W of this microbatch.
        """
        self._expect("B", microbatch)
        self._keep_output_grads(microbatch, output_grads)
        grads = self._active.backward_input(self._flights[microbatch], output_grads)
        self._next["B"] += 1
        return grads

    def backward_weight(self, microbatch: int) -> None:
        """W. Adds this microbatch's share to ``.grad`` and forgets the microbatch."""
        self._expect("W", microbatch)
        self._active.backward_weight(self._flights[microbatch])
        self._finish(microbatch)

    def backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """B and W at once (the op BW). Arguments and result as :meth:`backward_input`."""
        self._expect("B", microbatch)
        self._expect("W", microbatch, fused=True)
        self._keep_output_grads(microbatch, output_grads)
        grads = self._active.backward(self._flights[microbatch], output_grads)
        self._next["B"] += 1
        self._finish(microbatch)
        return grads

    def _keep_output_grads(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None
    ) -> None:
        """Of the microbatches that the self-test will run."""
        if self.untested and microbatch < len(self._samples):
            kept = self._samples[microbatch]
            if kept.output_grads is None and output_grads is not None:
                grads = copy_tensors(tuple(output_grads))
                self._samples[microbatch] = replace(kept, output_grads=grads)

    def discard(self) -> None:
        """Drop every microbatch in flight, as after a failed iteration. ``.grad`` stays."""
        for flight in self._flights.values():
            if flight.saved is not None and self._store is not None:
                self._store.forget(flight.saved)
        self._flights.clear()
        self._samples = []
        self._next = {"F": 0, "B": 0, "W": 0}

    def _expect(self, kind: str, microbatch: int, *, fused: bool = False) -> None:
        expected = self._next[kind]
        if microbatch != expected:
            raise OrderError(f"{kind}{microbatch} where {kind}{expected} is next in order")
        before = {"F": None, "B": "F", "W": "B"}[kind]
        if before is not None and not fused and microbatch >= self._next[before]:
            raise OrderError(f"{kind}{microbatch} before {before}{microbatch}")
        if kind == "F" and microbatch >= self.microbatches:
            raise OrderError(f"F{microbatch} of {self.microbatches} microbatches")
        if kind == "B":
            saved = self._flights[microbatch].saved
            if saved is not None and saved.block is not None:
                raise OrderError(f"B{microbatch} before its activations came from host memory")

    def _finish(self, microbatch: int) -> None:
        del self._flights[microbatch]
        self._next["W"] += 1
        if self._next["W"] == self.microbatches:
            self._next = {"F": 0, "B": 0, "W": 0}
