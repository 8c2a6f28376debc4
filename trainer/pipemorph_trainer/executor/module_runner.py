"""Runner of a module: F, B and W of one stage, for the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.autograd_internals import find_missing_features, is_compiled
from pipemorph_trainer.backward import function_patches
from pipemorph_trainer.backward.compiled.backends import may_round_if_cut
from pipemorph_trainer.backward.forward_replay import ForwardReplay, RecomputeRecord, digest_tensor
from pipemorph_trainer.backward.microbatch_state import (
    DeferringBackward,
    Grads,
    LossFn,
    MicrobatchState,
    StageCall,
    WholeBackward,
)
from pipemorph_trainer.backward.output_structure import OutputStructure
from pipemorph_trainer.backward.split_report import (
    Mode,
    OpOrderError,
    Split,
    SplitReport,
    build_split_report,
)
from pipemorph_trainer.backward.stage_measurements import StageMeasurements
from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.op_runner import OpRunner
from pipemorph_trainer.executor.sharded_modules import ShardedModules, is_sharded, place_gradients
from pipemorph_trainer.topology.placement import is_dtensor

if TYPE_CHECKING:
    from pipemorph_trainer.memory.activation_store import ActivationStore


class ModuleRunner(OpRunner):
    """Runner of any ``nn.Module`` stage; one per rank and stage.

    F, B and W each run in microbatch order 0 … N-1; the next iteration starts at 0 again. A
    microbatch is either split (:meth:`backward_input`, then :meth:`backward_weight`) or fused
    (:meth:`run_fused_backward`). Since W runs in microbatch order, too, every ``.grad`` is bitwise
    equal to that of a sequential run of the microbatches.

    Args:
        module: the stage. Its class, names and ``state_dict`` do not change.
        is_first: inputs are data without gradients.
        is_last: the output goes to ``loss_fn`` (None: the module returns its loss).
        microbatches: N; each loss is divided by it before the backward.
        mode: choice of the gradients that wait for W. ``verify`` compares each of them.
        store: host memory for activations; None: they stay on the device. Those of the second
            microbatch move there and back once, as a test.

    A stage that ``fully_shard`` has sharded is gathered from :meth:`begin_iteration` to
    :meth:`end_iteration`, which reduces its gradients; both are collective. So are the ops, if
    modules of the stage are set to reshard after each use.
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
        self.microbatches = self._count = microbatches
        self.mode: Mode = mode
        self.measured = StageMeasurements(module)
        self._store = store
        self._call = StageCall(
            module,
            is_first=is_first,
            is_last=is_last,
            loss_fn=loss_fn,
            divisor=microbatches,
        )
        self._sharded = ShardedModules(module) if is_sharded(module) else None
        self._distributed = any(map(is_dtensor, module.parameters()))
        self._plain = WholeBackward()
        self._deferring: DeferringBackward | None = None
        if mode != "fused" and not find_missing_features():
            self._deferring = DeferringBackward(module, verify=mode == "verify")
        # Code is then compiled once, for one form of torch's functions.
        self._one_form = self._deferring is not None and any(map(is_compiled, module.modules()))
        self._may_round = self._one_form and any(map(may_round_if_cut, module.modules()))
        """True if compiled code that has not run yet may be cut, and then round elsewhere."""
        if not is_last:
            # At the first backward with gradients torch imports for seconds: do it here on all
            # ranks at once, not on one after the other in the first iteration.
            torch.autograd.backward([torch.zeros(1, requires_grad=True) * 1], [torch.ones(1)])
        self._whole: Set[int] = frozenset()
        """Microbatches with a whole backward."""
        self.is_measuring = False
        """True if backwards of this iteration run for their times, whatever the plan."""
        self._began, self._measuring = False, True
        self._parameters = list(module.parameters())
        self._rerun: ForwardReplay | None = None
        self._recompute_records: dict[int, RecomputeRecord] = {}
        """Records of microbatches whose activations were dropped."""
        self._flights: dict[int, MicrobatchState] = {}
        self._next = {"F": 0, "B": 0, "W": 0}

    @property
    def split(self) -> Split:
        """Way in which this stage runs its backward, as far as it is known."""
        waits = self._deferring is not None and (self._deferring.deferred or not self._began)
        return "deferred" if waits else "fused"

    def build_report(self) -> SplitReport:
        """Return the report of what was deferred so far, and why the rest was not."""
        return build_split_report(self.module, self.mode, self._deferring)

    @property
    def in_flight(self) -> int:
        """Number of microbatches whose F has started and whose W has not finished."""
        return len(self._flights)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Flags of the trained parameters. If they change, outputs may need other gradients."""
        return tuple(parameter.requires_grad for parameter in self._parameters)

    @property
    def structure(self) -> OutputStructure:
        """Structure of the outputs of the newest F or evaluation."""
        return self._call.structure

    def expect_inputs(self, structure: OutputStructure, gradients: Sequence[bool]) -> None:
        """Set the structure of F's positional arguments, and which of them need a gradient. By
        default the module gets them unchanged, and all floating-point ones need one."""
        self._call.received, self._call.needed = structure, tuple(gradients)

    def begin_iteration(
        self,
        *,
        fused: Set[int],
        outputs: list[Any] | None = None,
        divisor: float | None = None,
        microbatches: int | None = None,
    ) -> None:
        """Begin an iteration. ``fused``: the microbatches whose backward is one op (BW).
        ``outputs``: the last stage appends what its module returns for each microbatch, detached.
        ``divisor``: divides each loss before its backward; None: N. ``microbatches``: number of
        this iteration; None: N.

        F and BW of ``fused`` run without the overhead of a split, except those that
        :class:`StageMeasurements` chooses. Raises :class:`SplitError` if microbatches are in
        flight.
        """
        if self._flights:
            raise SplitError(f"a new iteration with {len(self._flights)} microbatches in flight")
        self._count = self.microbatches if microbatches is None else microbatches
        self._call.outputs = outputs
        self._call.divisor = self.microbatches if divisor is None else divisor
        if self._store is not None:
            self._store.reclaim_memory()
        if self._sharded is not None:
            self._sharded.gather_parameters()
        self._whole, self.is_measuring = fused, False
        if self._deferring is None:
            return
        if self._began:
            # Which code was cut is known now.
            self._may_round = False
        if self.mode == "verify":
            self._whole = frozenset()
        elif self._measuring:
            measured = self.measured.choose_whole_backwards(self._count)
            self._measuring = measured is not None
            if measured is not None:
                self._whole, self.is_measuring = measured, True
        if not self._began:
            # FSDP2's parameters are other objects once they are gathered, and hooks may be new.
            self._deferring.collector.register_all()
        else:
            self._deferring.collector.recheck_exclusions()

    def end_iteration(self) -> None:
        """End an iteration: reduce the gradients of a distributed stage, if there are any."""
        if self._sharded is not None:
            self._sharded.reduce_gradients()
        if self._distributed:
            place_gradients(self.module)

    def _choose_backward(self, microbatch: int) -> WholeBackward:
        if self._deferring is None:
            return self._plain
        # Compiled code that is cut may round elsewhere. The bits must not depend on the plan.
        rounds = self._may_round or self._deferring.collector.tolerance
        whole = microbatch in self._whole and not rounds
        return self._plain if whole else self._deferring

    def run_forward(
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

        ``args`` must not change before W of this microbatch, since autograd holds them. With
        ``offload``, :meth:`offload_activations` may follow. With ``recompute`` only the arguments
        remain, and :meth:`recompute_forward` must precede its B.
        """
        if microbatch != self._next["F"] or microbatch >= self._count:
            self._check_op_order("F", microbatch)
        if self._store is None and self.measured.sized and not (offload or recompute):
            self._flights[microbatch] = flight = self._call_stage(microbatch, args, kwargs, target)
            self._next["F"] += 1
            sent, flight.sent = flight.sent, ()
            return sent
        tries = (
            self._store is not None and self.measured.tries_offload and not (offload or recompute)
        )
        batch = (args if self._call.is_first else (), kwargs, target)
        if offload or tries:
            with self._require_store().record_saved_tensors() as saved:
                flight = self._call_stage(microbatch, args, kwargs, target)
            flight.saved = saved
            self.measured.measure_sizes(flight, args, batch)
            if tries:
                self.measured.try_offload(flight, args, self._require_store())
        elif recompute:
            if self._rerun is None:
                self._rerun = ForwardReplay(self.module)
            with self._rerun.record_first_run() as begun:
                flight = self._call_stage(microbatch, args, kwargs, target)
            self.measured.measure_sizes(flight, args, batch)
            digests = [digest_tensor(each) for each in flight.sent]
            self._recompute_records[microbatch] = RecomputeRecord(
                args, kwargs, target, begun, digests
            )
            # Without the graph, so without activations.
            flight = MicrobatchState(microbatch, sent=flight.sent)
        else:
            flight = self._call_stage(microbatch, args, kwargs, target)
            self.measured.measure_sizes(flight, args, batch)
        self._flights[microbatch] = flight
        self._next["F"] += 1
        sent = flight.sent
        if not offload:
            flight.sent = ()
        return sent

    def evaluate_microbatch(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
    ) -> tuple[Tensor, ...]:
        """Run a forward without gradients or a saved graph. Returns the same as
        :meth:`run_forward`. The module's mode (train or eval) does not change."""
        with function_patches.patched_functions() if self._one_form else nullcontext():
            return self._call.run_without_gradients(args, kwargs, target)

    def _call_stage(
        self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None, target: Any
    ) -> MicrobatchState:
        splitter = self._choose_backward(microbatch)
        if not self._one_form:
            return splitter.run_forward(self._call, microbatch, args, kwargs, target)
        with function_patches.patched_functions():
            return splitter.run_forward(self._call, microbatch, args, kwargs, target)

    def offload_activations(self, microbatch: int) -> int:
        """Move the activations of ``microbatch``, the newest F, to host memory and free their
        device memory. Returns the bytes moved. Call :meth:`fetch_activations` before its B.

        Parameters, buffers and other tensors with references elsewhere stay, so the caller should
        drop the arguments of that F. Raises :class:`SplitError` if that F was run without
        ``offload``, and :class:`PipelineError` if there is no room.
        """
        flight = self._flights[microbatch]
        if flight.saved is None:
            raise SplitError(f"F{microbatch} was not run with offload; its tensors are not known")
        return flight.offload_activations(self._require_store(), keep_outputs=self._call.is_last)

    def reclaim_memory(self) -> None:
        """Make the device wait for copies to the host, as an F with ``offload`` does."""
        self._require_store().reclaim_memory()

    def fetch_activations(self, microbatch: int) -> int:
        """Copy back what :meth:`offload_activations` moved. Returns the bytes moved."""
        flight = self._flights[microbatch]
        if flight.saved is None or flight.saved.block is None:
            raise OpOrderError(f"the activations of microbatch {microbatch} are not in host memory")
        return self._require_store().fetch_activations(flight.saved)

    def recompute_forward(self, microbatch: int) -> None:
        """Run the forward of ``microbatch`` again, whose F was run with ``recompute``, to the bit
        as it ran then. Raises :class:`OpOrderError` for any other."""
        record = self._recompute_records.pop(microbatch, None)
        if record is None or self._rerun is None:
            raise OpOrderError(
                f"F{microbatch} was not run with recompute; its activations are here"
            )
        self._flights[microbatch] = record.rerun_forward(
            self._choose_backward(microbatch), self._call, microbatch, self._rerun
        )

    def _require_store(self) -> ActivationStore:
        """Return the store. Raises :class:`SplitError` if there is none."""
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
        self._check_op_order("B", microbatch)
        splitter, flight = self._choose_backward(microbatch), self._flights[microbatch]
        whole = splitter is self._plain
        if self.is_measuring and whole:
            # A whole backward adds to gradients, so earlier microbatches must have been added.
            for earlier in range(self._next["W"], microbatch):
                self._run_weight_work(self._flights[earlier])
        if not (self._one_form or self.is_measuring):
            grads = splitter.backward_input(flight, output_grads)
        else:
            with (
                function_patches.patched_functions() if self._one_form else nullcontext(),
                self._time_op("whole" if whole else "B"),
            ):
                grads = splitter.backward_input(flight, output_grads)
        self._next["B"] += 1
        return grads

    def backward_weight(self, microbatch: int) -> None:
        """Run W: add this microbatch's gradients to ``.grad``, and drop the microbatch."""
        self._check_op_order("W", microbatch)
        self._run_weight_work(self._flights[microbatch])
        self._finish_microbatch(microbatch)

    def _run_weight_work(self, flight: MicrobatchState) -> None:
        if self._deferring is not None and flight.work:
            gathered: AbstractContextManager[None] = nullcontext()
            frees = self._sharded is not None and self._sharded.frees_parameters
            if self._sharded is not None and frees and any(w.uses_values for w in flight.work):
                gathered = self._sharded.gathered_for_weights()
            with gathered, self._time_op("W"):
                self._deferring.backward_weight(flight)

    def _time_op(self, kind: str) -> AbstractContextManager[None]:
        return self.measured.time_backward(kind) if self.is_measuring else nullcontext()

    def run_fused_backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """Run B and W as one op (BW). Arguments and result as in :meth:`backward_input`."""
        self._check_op_order("W", microbatch, fused=True)
        grads = self.backward_input(microbatch, output_grads)
        self.backward_weight(microbatch)
        return grads

    def discard_microbatches(self) -> None:
        """Drop every microbatch in flight, as after a failed iteration. ``.grad`` does not
        change."""
        for flight in self._flights.values():
            if flight.saved is not None and self._store is not None:
                self._store.release_block(flight.saved)
        self._flights.clear()
        self._recompute_records.clear()
        self._next = {"F": 0, "B": 0, "W": 0}

    def _check_op_order(self, kind: str, microbatch: int, *, fused: bool = False) -> None:
        expected = self._next[kind]
        if microbatch != expected:
            raise OpOrderError(f"{kind}{microbatch} where {kind}{expected} is next in order")
        before = {"F": None, "B": "F", "W": "B"}[kind]
        if before is not None and not fused and microbatch >= self._next[before]:
            raise OpOrderError(f"{kind}{microbatch} before {before}{microbatch}")
        if kind == "F" and microbatch >= self._count:
            raise OpOrderError(f"F{microbatch} of {self._count} microbatches")
        if kind == "B":
            saved = self._flights[microbatch].saved
            if saved is not None and saved.block is not None:
                raise OpOrderError(f"B{microbatch} before its activations came from host memory")
            if microbatch in self._recompute_records:
                raise OpOrderError(f"B{microbatch} before its forward ran again")

    def _finish_microbatch(self, microbatch: int) -> None:
        del self._flights[microbatch]
        self._began = True
        self._next["W"] += 1
        if self._next["W"] == self._count:
            self._next = {"F": 0, "B": 0, "W": 0}
