"""How F, B and W of one stage run: with W apart, or whole. W computes the gradients that waited,
and adds them up as autograd does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.executor.grad_form import as_grad, grad_dtype
from pipemorph_trainer.executor.split import calls, sinks
from pipemorph_trainer.executor.split.flight import Flight, Grads, Root, StageCall, nodes_below
from pipemorph_trainer.executor.split.sinks import Sink, Work
from pipemorph_trainer.executor.stages.written import written


class Splitter:
    """Runs F, B and W of one stage without a split: B is the whole backward, W is empty. The caller
    is responsible for the order of ops.

    Tensors passed to :meth:`forward` and :meth:`backward_input` may be kept until
    :meth:`backward_weight` of the same microbatch, and must not change before.
    """

    def forward(
        self,
        call: StageCall,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        target: Any,
    ) -> Flight:
        return call(microbatch, args, kwargs, target)

    def backward_input(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        tensors, grads = flight.roots(output_grads)
        flight.outputs = ()
        if tensors:
            torch.autograd.backward(tensors, grads)
        return flight.take_input_grads(output_grads)

    def backward_weight(self, flight: Flight) -> None:
        """Does nothing: B was the whole backward."""

    def backward(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        grads = self.backward_input(flight, output_grads)
        self.backward_weight(flight)
        return grads


class Deferring(Splitter):
    """Runs B without the weight gradients that can wait for W. B frees every activation except the
    operands of W.

    On the first stage B has no input gradient to compute, but still runs the backward of everything
    that is not deferred, so that activations are freed as early as on other stages.
    """

    def __init__(self, stage: nn.Module, *, verify: bool = False) -> None:
        self.sink = Sink(stage, verify=verify)
        self.deferred: set[str] = set()
        """Names of the parameters whose gradients W has computed so far."""
        self.seen: dict[str, str] = {}
        """Parameters that ops of another kind use, by name, with the op."""
        self._walked = False

    @property
    def tolerance(self) -> float:
        """How much gradients may differ from those of an unsplit backward, relative to the largest
        element: 0 unless compiled code was cut, which may round elsewhere then."""
        return self.sink.tolerance

    def forward(
        self,
        call: StageCall,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        target: Any,
    ) -> Flight:
        # As with `calls.patched(), self.sink`, in fewer calls.
        calls.patch()
        sinks.catching.append(self.sink)
        try:
            return call(microbatch, args, kwargs, target)
        finally:
            sinks.catching.remove(self.sink)
            calls.unpatch()

    def backward_input(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        tensors, grads = flight.roots(output_grads)
        flight.outputs = ()
        flight.work = []
        if tensors:
            # Patched here, too, since activation checkpointing calls the functions again.
            with calls.patched(), self.sink:
                if not self._walked:
                    self.walk(tensors)
                self.sink.open()
                try:
                    torch.autograd.backward(tensors, grads)
                finally:
                    flight.work = self.sink.take()
        return flight.take_input_grads(output_grads)

    def backward_weight(self, flight: Flight) -> None:
        self.run_weight_work(flight.work)

    def run_weight_work(self, work: list[Work]) -> None:
        """Run the W of one microbatch. Empties ``work``."""
        for item in work:
            for each in item.owners:
                self.deferred.add(each.name)
        run_weight_work(work)

    def walk(self, roots: Sequence[Root]) -> None:
        """Before the first B: exclude the parameters that ops of another kind use, too."""
        self._walked = True
        uses: dict[int, tuple[Tensor, list[Any]]] = {}
        for node, leaf in _leaves(roots):
            uses.setdefault(id(leaf), (leaf, []))[1].append(node)
        for leaf, nodes in uses.values():
            others = [node for node in nodes if not calls.is_call(node)]
            each = sinks.owned(leaf, in_graph=True, in_use=False) if others else None
            if each is None:
                continue
            names = {"an output" if node is None else node.name() for node in others}
            self.seen[each.name] = min(names).removesuffix("0").removesuffix("Backward")
            compiled = {name.startswith("CompiledFunction") for name in names}
            if (len(others) < len(nodes) or len(compiled) > 1) and not each.excluded:
                each.excluded = f"it is also used in {self.seen[each.name]}"


def _leaves(roots: Sequence[Root]) -> Iterator[tuple[Any, Tensor]]:
    """Each leaf of a graph with each node that uses it."""
    yield from ((None, root) for root in roots if isinstance(root, Tensor) and root.is_leaf)
    for node in nodes_below(roots):
        for below, _ in node.next_functions:
            leaf = getattr(below, "variable", None)
            if leaf is not None:
                yield node, leaf


def run_weight_work(work: list[Work]) -> None:
    """Run W: compute the deferred gradients and add them to ``.grad``. Empties ``work``.

    The contributions of a weight that is used several times in one backward are summed in B's
    order, and then added to ``.grad`` once, like in autograd: in the dtype of the gradient, but for
    those of a weight that autocast has cast, which autograd sums before it casts them back. A
    backward inside a backward, as of a reentrant checkpoint, adds to ``.grad`` by itself.

    Raises :class:`SplitError` if an operand was overwritten since B.
    """
    left: dict[tuple[int, int], int] = {}
    for item in work:
        for parameter in item.parameters:
            key = item.task, id(parameter)
            left[key] = left.get(key, 0) + 1
    sums: dict[tuple[int, int], Tensor] = {}
    work.reverse()
    with torch.no_grad():
        while work:
            item = work.pop()
            item.check_unchanged()
            for parameter, found in zip(item.parameters, item.gradients(), strict=True):
                key = item.task, id(parameter)
                left[key] -= 1
                cast = found.dtype != parameter.dtype
                grad = found if cast else found.to(grad_dtype(parameter))
                partial = sums.pop(key, None)
                total = grad if partial is None else partial + grad
                if left[key]:
                    sums[key] = total
                else:
                    accumulate(parameter, total)


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add a gradient to ``parameter.grad``, which gets the form that autograd gives it."""
    if parameter.grad is None:
        parameter.grad = as_grad(parameter, grad)
    else:
        parameter.grad.add_(grad.to(grad_dtype(parameter)))
    written(parameter)
