"""Runs F, B and W of one stage for the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split import calls
from pipemorph_trainer.executor.split.compiled.backends import rounds_if_cut
from pipemorph_trainer.executor.split.flight import (
    Deferring,
    Flight,
    Grads,
    LossFn,
    Splitter,
    StageCall,
)
from pipemorph_trainer.executor.split.measured import Measurements
from pipemorph_trainer.executor.split.report import Mode, OrderError, Split, SplitReport, report_of
from pipemorph_trainer.executor.split.rerun import Kept, Rerun, digest
from pipemorph_trainer.executor.stages.interface import Runner
from pipemorph_trainer.executor.stages.sharded import Sharded, is_sharded, place_gradients
from pipemorph_trainer.executor.stages.structure import Structure
from pipemorph_trainer.executor.torch_private import compiled, missing
from pipemorph_trainer.topology.placement import is_dtensor

if TYPE_CHECKING:
    from pipemorph_trainer.executor.offload.store import ActivationStore


class StageRunner(Runner):
    """Wraps any ``nn.Module`` stage; one per rank and stage.

    F, B and W each run in microbatch order 0 … N-1; the next iteration starts at 0 again. A
    microbatch is either split (:meth:`backward_input`, then :meth:`backward_weight`) or fused
    (:meth:`backward`). Since W runs in microbatch order, too, every ``.grad`` is bitwise equal to
    that of a sequential run of the microbatches.

    Args:
        module: the stage. Its class, names and ``state_dict`` do not change.
        is_first: inputs are data, which get no gradient.
        is_last: the output goes to ``loss_fn`` (None: the module returns its loss).
        microbatches: N; each loss is divided by it before the backward.
        mode: whether gradients wait for W. In ``verify``, each that does is compared.
        store: host memory for activations; None: they stay on the device. Those of the second
            microbatch go there and back once, as a test.

    A stage that ``fully_shard`` has sharded is gathered from :meth:`begin_iteration` to
    :meth:`end_iteration`, which reduces its gradients; both are collective. So are the ops, if
    modules of the stage ask to be sharded again after each use.
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
        self.measured = Measurements(module)
        self._store = store
        self._call = StageCall(
            module,
            is_first=is_first,
            is_last=is_last,
            loss_fn=loss_fn,
            divisor=microbatches,
        )
        self._sharded = Sharded(module) if is_sharded(module) else None
        self._distributed = any(map(is_dtensor, module.parameters()))
        self._plain = Splitter()
        self._deferring: Deferring | None = None
        if mode != "fused" and not missing():
            self._deferring = Deferring(module, verify=mode == "verify")
            self._deferring.sink.own_all()
        # So that code is compiled once, for one form of torch's functions.
        self._one_form = self._deferring is not None and any(map(compiled, module.modules()))
        self._may_round = self._one_form and any(map(rounds_if_cut, module.modules()))
        """Whether compiled code that has not run yet may be cut, and round elsewhere then."""
        if not is_last:
            # At the first backward with gradients torch imports for seconds: here on all ranks at
            # once, instead of on one after the other in the first iteration.
            torch.autograd.backward([torch.zeros(1, requires_grad=True) * 1], [torch.ones(1)])
        self._whole: Set[int] = frozenset()
        """Microbatches whose backward is whole."""
        self.measures = False
        """Whether backwards of this iteration are run for their time, whatever the plan."""
        self._began, self._measuring = False, True
        self._parameters = list(module.parameters())
        self._rerun: Rerun | None = None
        self._kept: dict[int, Kept] = {}
        """Of microbatches whose activations were dropped."""
        self._flights: dict[int, Flight] = {}
        self._next = {"F": 0, "B": 0, "W": 0}

    @property
    def split(self) -> Split:
        """How this stage runs its backward, as far as it is known."""
        waits = self._deferring is not None and (self._deferring.deferred or not self._began)
        return "deferred" if waits else "fused"

    def report(self) -> SplitReport:
        """What was deferred so far, and why the rest was not."""
        return report_of(self.module, self.mode, self._deferring)

    @property
    def in_flight(self) -> int:
        """Microbatches whose F has started and whose W has not finished."""
        return len(self._flights)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each parameter is trained. If it changes, outputs may need other gradients."""
        return tuple(parameter.requires_grad for parameter in self._parameters)

    @property
    def structure(self) -> Structure:
        """The structure of the outputs of the newest F or evaluation."""
        return self._call.structure

    def expect(self, structure: Structure, gradients: Sequence[bool]) -> None:
        """Say how the module gets the positional arguments of F, and which of them need a gradient.
        By default it gets them as they are, and all floating-point ones need one."""
        self._call.received, self._call.needed = structure, tuple(gradients)

    def begin_iteration(
        self,
        *,
        fused: Set[int],
        outputs: list[Any] | None = None,
        divisor: float | None = None,
    ) -> None:
        """Begin an iteration. ``fused``: the microbatches whose backward is one op (BW).
        ``outputs``: the last stage appends what its module returns for each microbatch, detached.
        ``divisor``: of each loss before its backward; None: N.

        Their F and BW run without the overhead of a split, but for those that
        :class:`Measurements` takes. Raises :class:`SplitError` with microbatches in flight.
        """
        if self._flights:
            raise SplitError(f"a new iteration with {len(self._flights)} microbatches in flight")
        self._call.outputs = outputs
        self._call.divisor = self.microbatches if divisor is None else divisor
        if self._store is not None:
            self._store.reclaim()
        if self._sharded is not None:
            self._sharded.gather()
        self._whole, self.measures = fused, False
        if self._deferring is None:
            return
        if self._began:
            # What was cut is known now.
            self._may_round = False
        if self.mode == "verify":
            self._whole = frozenset()
        elif self._measuring:
            measured = self.measured.whole(self.microbatches)
            self._measuring = measured is not None
            if measured is not None:
                self._whole, self.measures = measured, True
        if not self._began:
            # FSDP2's parameters are others once they are gathered, and hooks may be new.
            self._deferring.sink.own_all()
        else:
            self._deferring.sink.look_again()

    def end_iteration(self) -> None:
        """End an iteration: reduce the gradients of a distributed stage, if there are any."""
        if self._sharded is not None:
            self._sharded.reduce()
        if self._distributed:
            place_gradients(self.module)

    def _splits(self, microbatch: int) -> Splitter:
        if self._deferring is None:
            return self._plain
        # Compiled code that is cut may round elsewhere: the same plan or not, the bits stay.
        rounds = self._may_round or self._deferring.sink.tolerance
        whole = microbatch in self._whole and not rounds
        return self._plain if whole else self._deferring

    def forward(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        *,
        offload: bool = False,
        recompute: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run F. Returns the outputs to send, detached, with ``requires_grad`` where a gradient has
        to come back; on the last stage ``(loss,)``, the loss of this microbatch before the division
        by N.

        ``args`` must not change before W of this microbatch, since autograd keeps them. With
        ``offload``, :meth:`offload` may follow. With ``recompute`` only the arguments are kept, and
        :meth:`recompute` must precede its B.
        """
        if microbatch != self._next["F"] or microbatch >= self.microbatches:
            self._expect("F", microbatch)
        if self._store is None and self.measured.sized and not (offload or recompute):
            self._flights[microbatch] = flight = self._forward(microbatch, args, kwargs, target)
            self._next["F"] += 1
            sent, flight.sent = flight.sent, ()
            return sent
        tries = (
            self._store is not None and self.measured.tries_offload and not (offload or recompute)
        )
        batch = (args if self._call.is_first else (), kwargs, target)
        if offload or tries:
            with self._storing().recording() as saved:
                flight = self._forward(microbatch, args, kwargs, target)
            flight.saved = saved
            self.measured.size(flight, args, batch)
            if tries:
                self.measured.try_offload(flight, args, self._storing())
        elif recompute:
            if self._rerun is None:
                self._rerun = Rerun(self.module)
            with self._rerun.first() as begun:
                flight = self._forward(microbatch, args, kwargs, target)
            self.measured.size(flight, args, batch)
            digests = [digest(each) for each in flight.sent]
            self._kept[microbatch] = Kept(args, kwargs, target, begun, digests)
            # Without the graph, and so without the activations.
            flight = Flight(microbatch, sent=flight.sent)
        else:
            flight = self._forward(microbatch, args, kwargs, target)
            self.measured.size(flight, args, batch)
        self._flights[microbatch] = flight
        self._next["F"] += 1
        sent = flight.sent
        if not offload:
            flight.sent = ()
        return sent

    def evaluate(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
    ) -> tuple[Tensor, ...]:
        """Run a forward without gradients, of which nothing is kept. Returns what :meth:`forward`
        returns. The module's mode (train or eval) stays as it is."""
        with calls.patched() if self._one_form else nullcontext():
            return self._call.evaluate(args, kwargs, target)

    def _forward(
        self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None, target: Any
    ) -> Flight:
        splitter = self._splits(microbatch)
        if not self._one_form:
            return splitter.forward(self._call, microbatch, args, kwargs, target)
        with calls.patched():
            return splitter.forward(self._call, microbatch, args, kwargs, target)

    def offload(self, microbatch: int) -> int:
        """Move the activations of ``microbatch``, the newest F, to host memory and free their
        device memory. Returns the bytes moved. Call :meth:`fetch` before its B.

        Parameters, buffers and other tensors with references elsewhere stay, so the caller should
        drop the arguments of that F. Raises :class:`SplitError` if that F was run without
        ``offload``, and :class:`PipelineError` if there is no room.
        """
        flight = self._flights[microbatch]
        if flight.saved is None:
            raise SplitError(f"F{microbatch} was not run with offload; its tensors are not known")
        return flight.leave(self._storing(), keep_outputs=self._call.is_last)

    def reclaim(self) -> None:
        """Make the device wait for copies to the host. An F with ``offload`` does so, too."""
        self._storing().reclaim()

    def fetch(self, microbatch: int) -> int:
        """Bring the activations that :meth:`offload` moved back. Returns the bytes moved."""
        flight = self._flights[microbatch]
        if flight.saved is None or flight.saved.block is None:
            raise OrderError(f"the activations of microbatch {microbatch} are not in host memory")
        return self._storing().fetch(flight.saved)

    def recompute(self, microbatch: int) -> None:
        """Run the forward of ``microbatch`` again, whose F was run with ``recompute``, to the bit
        as it ran then. Raises :class:`OrderError` for any other."""
        kept = self._kept.pop(microbatch, None)
        if kept is None or self._rerun is None:
            raise OrderError(f"F{microbatch} was not run with recompute; its activations are here")
        self._flights[microbatch] = kept.run(
            self._splits(microbatch), self._call, microbatch, self._rerun
        )

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
        """Run B. ``output_grads``: one per output of F, None for outputs without a gradient;
        omitted on the last stage.

        Returns one gradient per positional argument of F: None for arguments that are not
        floating-point or not used, and on the first stage. ``output_grads`` must not change before
        W of this microbatch.
        """
        self._expect("B", microbatch)
        splitter, flight = self._splits(microbatch), self._flights[microbatch]
        whole = splitter is self._plain
        if self.measures and whole:
            # A whole backward adds to gradients, so what is before it has to be there already.
            for earlier in range(self._next["W"], microbatch):
                self._run_weights(self._flights[earlier])
        if not (self._one_form or self.measures):
            grads = splitter.backward_input(flight, output_grads)
        else:
            with (
                calls.patched() if self._one_form else nullcontext(),
                self._time("whole" if whole else "B"),
            ):
                grads = splitter.backward_input(flight, output_grads)
        self._next["B"] += 1
        return grads

    def backward_weight(self, microbatch: int) -> None:
        """Run W: add this microbatch's gradients to ``.grad``, and drop the microbatch."""
        self._expect("W", microbatch)
        self._run_weights(self._flights[microbatch])
        self._finish(microbatch)

    def _run_weights(self, flight: Flight) -> None:
        if self._deferring is not None and flight.work:
            gathered: AbstractContextManager[None] = nullcontext()
            frees = self._sharded is not None and self._sharded.frees
            if self._sharded is not None and frees and any(w.uses_values for w in flight.work):
                gathered = self._sharded.gathered_for_weights()
            with gathered, self._time("W"):
                self._deferring.backward_weight(flight)

    def _time(self, kind: str) -> AbstractContextManager[None]:
        return self.measured.time(kind) if self.measures else nullcontext()

    def backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """Run B and W as one op (BW). Arguments and result as in :meth:`backward_input`."""
        self._expect("W", microbatch, fused=True)
        grads = self.backward_input(microbatch, output_grads)
        self.backward_weight(microbatch)
        return grads

    def discard(self) -> None:
        """Drop every microbatch in flight, as after a failed iteration. ``.grad`` does not
        change."""
        for flight in self._flights.values():
            if flight.saved is not None and self._store is not None:
                self._store.forget(flight.saved)
        self._flights.clear()
        self._kept.clear()
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
            if microbatch in self._kept:
                raise OrderError(f"B{microbatch} before its forward ran again")

    def _finish(self, microbatch: int) -> None:
        del self._flights[microbatch]
        self._began = True
        self._next["W"] += 1
        if self._next["W"] == self.microbatches:
            self._next = {"F": 0, "B": 0, "W": 0}
