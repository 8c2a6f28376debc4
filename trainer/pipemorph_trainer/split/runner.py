"""One stage's F, B and W, in microbatch order, for the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipemorph_trainer.split.flight import Flight, Grads, LossFn, StageCall
from pipemorph_trainer.split.report import Mode, OrderError, Split, SplitError, SplitReport
from pipemorph_trainer.split.self_test import SelfTest
from pipemorph_trainer.split.splitters import FusedSplit, Splitter
from pipemorph_trainer.split.trial import Sample

if TYPE_CHECKING:
    from pipemorph_trainer.offload.store import ActivationStore


class StageRunner:
    """Wraps any ``nn.Module`` stage; one per rank and stage.

    F, B and W each run in microbatch order 0 … N-1, then the next iteration starts at 0
    again. A microbatch is either split (:meth:`backward_input`, then
    :meth:`backward_weight`) or fused (:meth:`backward`). Since W runs in microbatch order
    too, every ``.grad`` is to the bit what a sequential run of the microbatches leaves.

    Before :meth:`self_test` every runner is fused. On a fused stage
    :meth:`backward_input` is the whole backward and :meth:`backward_weight` is empty, so a
    plan with B and W runs on any stage.

    Args:
        module: the stage. Its class, names and ``state_dict`` stay as they are.
        is_first: inputs are data: they get no gradient.
        is_last: the output goes to ``loss_fn`` (None: the module returns its loss).
        microbatches: N; the loss is divided by it before the backward.
        mode: ``auto``, or the one split to use; :meth:`self_test` raises if it fails.
        store: where activations go in host memory; None: they stay on the device.
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
        self.reason = "asked for" if mode == "fused" else "the self-test has not run"
        self._store = store
        self._call = StageCall(
            module,
            is_first=is_first,
            is_last=is_last,
            loss_fn=loss_fn,
            microbatches=microbatches,
        )
        self._splitter: Splitter = FusedSplit()
        self._plain = FusedSplit()
        self._only_fused = False
        self._flights: dict[int, Flight] = {}
        self._next = {"F": 0, "B": 0, "W": 0}

    @property
    def split(self) -> Split:
        """How this stage splits its backward now."""
        return self._splitter.split

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
            self._store.settle()

    @property
    def _active(self) -> Splitter:
        return self._plain if self._only_fused else self._splitter

    def self_test(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, target: Any = None
    ) -> SplitReport:
        """Choose the split by trying it on the stage itself with one real microbatch.

        Runs the stage several times on copies of the arguments and compares, bitwise, every
        output, input gradient, parameter gradient and buffer of split and unsplit runs over
        two microbatches. Tries module, then graph, then settles for fused. Leaves
        parameters, gradients, buffers and the random state as they were.

        Raises :class:`SplitError` if ``mode`` asked for a split that does not pass or if
        microbatches are in flight, and whatever the stage itself raises.
        """
        if self._flights:
            raise SplitError(f"self-test with {len(self._flights)} microbatches in flight")
        test = SelfTest(self._call, self.mode, Sample(args, kwargs or {}, target), self._store)
        self._splitter, self.report = test.run()
        self.reason = self.report.reason
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
        if offload:
            with self._storing().recording() as saved:
                flight = self._active.forward(self._call, microbatch, args, kwargs, target)
            flight.saved = saved
        else:
            flight = self._active.forward(self._call, microbatch, args, kwargs, target)
        self._flights[microbatch] = flight
        self._next["F"] += 1
        sent = flight.sent
        if not offload:
            flight.sent = ()
        return sent

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

    def settle(self) -> None:
        """Have the device wait for what is still leaving; an F with ``offload`` does so too."""
        self._storing().settle()

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
        grads = self._active.backward(self._flights[microbatch], output_grads)
        self._next["B"] += 1
        self._finish(microbatch)
        return grads

    def discard(self) -> None:
        """Drop every microbatch in flight, as after a failed iteration. ``.grad`` stays."""
        for flight in self._flights.values():
            if flight.saved is not None and self._store is not None:
                self._store.forget(flight.saved)
        self._flights.clear()
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
