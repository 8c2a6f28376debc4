"""Microbatch on a stage: its state between F and W, the call of the stage, and its F, B and W, with
W apart or in B. W computes the deferred gradients, and adds them up as autograd does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from pipemorph_trainer.autograd_internals import find_holder_count_problem, read_version
from pipemorph_trainer.backward import function_patches, work_collector
from pipemorph_trainer.backward.gradient_form import (
    grad_dtype,
    notify_gradient_written,
    to_grad_form,
)
from pipemorph_trainer.backward.output_structure import (
    SINGLE_TENSOR,
    OutputStructure,
    flatten_output,
)
from pipemorph_trainer.backward.weight_products import ViewGradient
from pipemorph_trainer.backward.work_collector import WeightWork, WorkCollector
from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.topology.placement import is_dtensor

if TYPE_CHECKING:
    from pipemorph_trainer.memory.activation_store import ActivationStore, SavedActivations

LossFn = Callable[[Any, Any], Tensor]
"""Loss function ``loss_fn(output, target) -> scalar``; ``output``: result of the last stage."""

Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class OutputEdge:
    """Output without its memory, sufficient for a backward."""

    edge: GradientEdge
    shape: torch.Size
    requires_grad = True

    @staticmethod
    def from_output(out: Tensor) -> OutputEdge:
        """Make the edge of an output, without its memory."""
        return OutputEdge(get_gradient_edge(out), out.shape)


Root = Any
"""Start of a backward: a tensor or a GradientEdge. torch accepts lists with both; its stubs require
one kind per list."""


@dataclass
class MicrobatchState:
    """State of one microbatch on one stage.

    ``leaves[j]``: positional argument *j* as an autograd leaf, None if it needs no gradient.
    ``outputs``: the stage's outputs (or the scaled loss), with their graph until B frees it.
    ``work``: data that the splitter holds from B to W. ``saved``: tensors that can move to host
    memory.
    """

    microbatch: int
    leaves: Grads = ()
    outputs: tuple[Tensor | OutputEdge, ...] = ()
    work: Any = None
    sent: tuple[Tensor, ...] = field(default=(), repr=False)
    saved: SavedActivations | None = field(default=None, repr=False)

    def offload_activations(self, store: ActivationStore, *, keep_outputs: bool) -> int:
        """Move the activations to host memory. Returns the bytes moved.

        Only the graph edges of the outputs remain, so that their memory is freed when they have
        been sent. ``keep_outputs``: keep them, for a loss, from which the backward starts.
        """
        assert self.saved is not None
        if not keep_outputs:
            self.outputs = tuple(
                OutputEdge.from_output(out)
                if isinstance(out, Tensor) and out.grad_fn is not None
                else out
                for out in self.outputs
            )
        moved = store.offload_activations(self.saved, self.leaves, self.sent)
        self.sent = ()
        return moved

    def select_roots(self, output_grads: Sequence[Tensor | None] | None) -> tuple[list[Root], Any]:
        """Return the outputs that take part in the backward, and their gradients.

        ``output_grads``: None on the last stage, where the only root is the loss. Raises
        :class:`SplitError` if the gradients do not match the outputs.
        """
        if output_grads is None:
            return [_as_root(out) for out in self.outputs if out.requires_grad], None
        if len(output_grads) != len(self.outputs):
            raise SplitError(
                f"microbatch {self.microbatch} has {len(self.outputs)} outputs; "
                f"got {len(output_grads)} output gradients"
            )
        tensors: list[Root] = []
        grads: list[Tensor] = []
        for index, (out, grad) in enumerate(zip(self.outputs, output_grads, strict=True)):
            if grad is None or not out.requires_grad:
                continue
            if grad.shape != out.shape:
                raise SplitError(
                    f"output {index} of microbatch {self.microbatch} has shape "
                    f"{tuple(out.shape)}; its gradient has {tuple(grad.shape)}"
                )
            tensors.append(_as_root(out))
            grads.append(grad)
        return tensors, grads

    def take_input_grads(self, output_grads: Sequence[Tensor | None] | None) -> Grads:
        """Return the gradients of the positional arguments, moved out of the leaves. A gradient
        that only passes through the stage gets its own memory: it is sent while ``output_grads``
        are reused."""
        used = {grad.data_ptr() for grad in output_grads or () if grad is not None}
        grads = []
        for leaf in self.leaves:
            grad = None
            if leaf is not None:
                grad, leaf.grad = leaf.grad, None
                if grad is not None and grad.layout is torch.strided and grad.data_ptr() in used:
                    grad = grad.clone()
            grads.append(grad)
        return tuple(grads)


def has_fresh_memory(out: Tensor) -> bool:
    """True if no other tensor shares the memory of this one, which an op has allocated and no op
    has written since. Custom functions may return memory of their module."""
    base = out if out._base is None else out._base
    node: Any = base.grad_fn
    if node is None or base._version:
        return False
    if isinstance(base.grad_fn, BackwardCFunction) and not hasattr(node._forward_cls, "allocates"):
        return False
    tensors = 1 if base is out else 2
    # Inlined holders(), since it runs for each F.
    storage = out.untyped_storage()
    return (
        not find_holder_count_problem()
        and torch._C._storage_Use_Count(storage._cdata) == tensors + 1
    )


def detach_for_send(out: Tensor) -> Tensor:
    """Return the tensor without its graph, with ``requires_grad`` as before; a copy unless it is
    fresh: the next forward may write to its memory, as to a buffer, while it is sent."""
    apart = out.detach() if has_fresh_memory(out) else out.detach().clone()
    return apart.requires_grad_(out.requires_grad)


def _as_root(out: Tensor | OutputEdge) -> Root:
    return out.edge if isinstance(out, OutputEdge) else out


def iterate_graph_nodes(roots: Iterable[Root]) -> Iterator[Any]:
    """Yield the nodes of a graph, each once."""
    seen: set[Any] = set()
    stack = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(below for below, _ in node.next_functions)


class StageCall:
    """Call of a stage for one microbatch, with inputs detached from earlier graphs.

    On every stage but the first, the positional arguments that need a gradient become autograd
    leaves; keyword arguments are local and get no gradient. On the last stage the loss is
    divided by ``divisor`` before the backward, usually by the number of microbatches, as
    ``(loss_fn(output, target) / microbatches).backward()`` does.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        is_first: bool,
        is_last: bool,
        loss_fn: LossFn | None,
        divisor: float,
    ) -> None:
        self.module = module
        self.is_first = is_first
        self.is_last = is_last
        self.loss_fn = loss_fn
        self.divisor = divisor
        self.received: OutputStructure | None = None
        """Structure in which the module gets its positional arguments; None: as they are."""
        self.structure = SINGLE_TENSOR
        """Structure of the outputs of the newest call."""
        self.needed: Sequence[bool] | None = None
        """Flags of the positional arguments that need a gradient; None: all floating-point ones."""
        self.outputs: list[Any] | None = None
        """List that gets the last stage's outputs; None: they are dropped."""
        self.writes_input: bool | None = None
        """True if the stage writes to its inputs in place, so that it gets copies; None before its
        first call, which gets copies, too."""

    def __call__(
        self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None, target: Any
    ) -> MicrobatchState:
        """Run the forward. Raises :class:`SplitError` if its results cannot be sent."""
        leaves: Grads = (None,) * len(args)
        inputs: list[Any] = list(args)
        if not self.is_first:
            leaves = tuple(self._make_leaf(index, arg) for index, arg in enumerate(args))
        with torch.enable_grad():
            for index, leaf in enumerate(leaves):
                if leaf is not None:
                    # Not the leaf itself: autocast casts a leaf once for all its uses.
                    as_is = self.writes_input is False
                    inputs[index] = leaf.view_as(leaf) if as_is else leaf.clone()
            output = self._call_module(inputs, kwargs)
            if self.writes_input is None:
                copies = [x for x, leaf in zip(inputs, leaves, strict=False) if leaf is not None]
                self.writes_input = any(read_version(copy) for copy in copies)
            if not self.is_last:
                outputs: tuple[Tensor, ...]
                if type(output) is Tensor:
                    outputs, self.structure = (output,), SINGLE_TENSOR
                else:
                    outputs, self.structure = flatten_output(output)
                return MicrobatchState(
                    microbatch, leaves, outputs, sent=tuple(map(detach_for_send, outputs))
                )
            loss = self._compute_loss(output, target)
            self._record_output(output)
            return MicrobatchState(
                microbatch, leaves, (loss / self.divisor,), sent=(detach_for_send(loss).detach(),)
            )

    def run_without_gradients(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, target: Any
    ) -> tuple[Tensor, ...]:
        """Run the forward without gradients. Returns the outputs to send, or the loss: NaN if there
        is no target for ``loss_fn``."""
        with torch.no_grad():
            output = self._call_module(args, kwargs)
            if not self.is_last:
                outputs, self.structure = flatten_output(output)
                return tuple(map(detach_for_send, outputs))
            self._record_output(output)
            if target is None and self.loss_fn is not None:
                return (torch.tensor(torch.nan),)
            return (detach_for_send(self._compute_loss(output, target)),)

    def _call_module(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        named = dict(kwargs or {})
        if self.received is not None:
            args, received = self.received.build_arguments(args)
            if twice := received.keys() & named.keys():
                raise SplitError(
                    f"the stage gets {min(twice)!r} from the stage above and from the keyword "
                    "arguments of this rank; give it once"
                )
            named |= received
        return self.module(*args, **named)

    def _record_output(self, output: Any) -> None:
        if self.outputs is not None:
            self.outputs.append(
                tree_map_only(Tensor, lambda out: detach_for_send(out).detach(), output)
            )

    def _make_leaf(self, index: int, arg: Any) -> Tensor | None:
        if isinstance(arg, Tensor):
            if self.needed is None:
                needed = arg.is_floating_point() or arg.is_complex()
            else:
                needed = self.needed[index]
            return arg.detach().requires_grad_() if needed else None
        if isinstance(arg, (list, tuple, dict)):
            raise SplitError(
                f"positional argument {index} of a stage is a {type(arg).__name__}; between "
                f"stages pass tensors one by one, so that each gets its gradient"
            )
        return None

    def _compute_loss(self, output: Any, target: Any) -> Tensor:
        loss = output if self.loss_fn is None else self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            source = "the last stage" if self.loss_fn is None else "loss_fn"
            raise SplitError(f"{source} returned {what}; expected a scalar loss")
        if is_dtensor(loss):
            source = "the last stage" if self.loss_fn is None else "loss_fn"
            raise SplitError(f"{source} returned a DTensor; return loss.full_tensor()")
        return loss


class WholeBackward:
    """F, B and W of one stage without a split: B is the whole backward, W is empty. The caller is
    responsible for the order of ops.

    Tensors passed to :meth:`run_forward` and :meth:`backward_input` may be in use until W of the
    same microbatch, and must not change before.
    """

    def run_forward(
        self,
        call: StageCall,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        target: Any,
    ) -> MicrobatchState:
        return call(microbatch, args, kwargs, target)

    def backward_input(
        self, flight: MicrobatchState, output_grads: Sequence[Tensor | None] | None
    ) -> Grads:
        tensors, grads = flight.select_roots(output_grads)
        flight.outputs = ()
        if tensors:
            torch.autograd.backward(tensors, grads)
        return flight.take_input_grads(output_grads)


class DeferringBackward(WholeBackward):
    """F, B and W of one stage, whose B skips weight gradients that can wait for W. B frees every
    activation except the operands of W.

    On the first stage B has no input gradient to compute, but still runs the backward of everything
    that is not deferred, so that activations are freed as early as on other stages.
    """

    def __init__(self, stage: nn.Module, *, verify: bool = False) -> None:
        self.collector = WorkCollector(stage, verify=verify)
        self.deferred: set[str] = set()
        """Names of the parameters whose gradients W has computed so far."""
        self.seen: dict[str, str] = {}
        """Names of parameters that ops of another kind use, with the op."""
        self._walked = False

    def run_forward(
        self,
        call: StageCall,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        target: Any,
    ) -> MicrobatchState:
        # Same as `with patched_functions(), self.collector`, in fewer calls.
        function_patches.patch_functions()
        work_collector.active_collectors.append(self.collector)
        try:
            return call(microbatch, args, kwargs, target)
        finally:
            work_collector.active_collectors.remove(self.collector)
            function_patches.restore_functions()

    def backward_input(
        self, flight: MicrobatchState, output_grads: Sequence[Tensor | None] | None
    ) -> Grads:
        tensors, grads = flight.select_roots(output_grads)
        flight.outputs = ()
        flight.work = []
        if tensors:
            # Patched here, too, since activation checkpointing calls the functions again.
            with function_patches.patched_functions(), self.collector:
                if not self._walked:
                    self.exclude_shared_parameters(tensors)
                self.collector.begin_backward()
                try:
                    torch.autograd.backward(tensors, grads)
                finally:
                    flight.work = self.collector.take_work()
        return flight.take_input_grads(output_grads)

    def backward_weight(self, flight: MicrobatchState) -> None:
        self.run_weight_work(flight.work)

    def run_weight_work(self, work: list[WeightWork]) -> None:
        """Run the W of one microbatch. Empties ``work``."""
        for item in work:
            for each in item.owners:
                self.deferred.add(each.name)
        run_weight_work(work)

    def exclude_shared_parameters(self, roots: Sequence[Root]) -> None:
        """Exclude the parameters that ops of another kind use, too. Call it before the first B."""
        self._walked = True
        uses: dict[int, tuple[Tensor, list[Any]]] = {}
        for node, leaf in _iterate_leaf_uses(roots):
            uses.setdefault(id(leaf), (leaf, []))[1].append(node)
        for leaf, nodes in uses.values():
            others = [node for node in nodes if not function_patches.is_deferrable_node(node)]
            each = (
                work_collector.find_trained_parameter(leaf, in_graph=True, in_use=False)
                if others
                else None
            )
            if each is None:
                continue
            names = {"an output" if node is None else node.name() for node in others}
            self.seen[each.name] = min(names).removesuffix("0").removesuffix("Backward")
            compiled = {name.startswith("CompiledFunction") for name in names}
            if (len(others) < len(nodes) or len(compiled) > 1) and not each.excluded:
                each.excluded = f"it is also used in {self.seen[each.name]}"


def _iterate_leaf_uses(roots: Sequence[Root]) -> Iterator[tuple[Any, Tensor]]:
    """Yield each leaf of a graph with each node that uses it."""
    yield from ((None, root) for root in roots if isinstance(root, Tensor) and root.is_leaf)
    for node in iterate_graph_nodes(roots):
        for below, _ in node.next_functions:
            leaf = getattr(below, "variable", None)
            if leaf is not None:
                yield node, leaf


def run_weight_work(work: list[WeightWork]) -> None:
    """Run W: compute the deferred gradients and add them to ``.grad``. Empties ``work``.

    The contributions of a weight that is used several times in one backward are summed in B's
    order, and then added to ``.grad`` once, as in autograd: in the dtype of the gradient, except
    those of a weight that autocast has cast, which autograd sums before casting back. A backward
    inside a backward, as of a reentrant checkpoint, adds to ``.grad`` by itself.

    Raises :class:`SplitError` if an operand was overwritten since B.
    """
    pending: dict[tuple[int, int], int] = {}
    for item in work:
        for parameter in item.parameters:
            key = item.task, id(parameter)
            pending[key] = pending.get(key, 0) + 1
    sums: dict[tuple[int, int], Tensor] = {}
    work.reverse()
    with torch.no_grad():
        while work:
            item = work.pop()
            item.check_unchanged()
            for parameter, found in zip(item.parameters, item.compute_gradients(), strict=True):
                key = item.task, id(parameter)
                pending[key] -= 1
                partial = sums.pop(key, None)
                if isinstance(found, ViewGradient):
                    total = _add_view_gradient(parameter, found, partial, alone=not pending[key])
                else:
                    cast = found.dtype != parameter.dtype
                    grad = found if cast else found.to(grad_dtype(parameter))
                    total = grad if partial is None else partial + grad
                if pending[key]:
                    sums[key] = total
                else:
                    accumulate_gradient(parameter, total)


def _add_view_gradient(
    parameter: nn.Parameter, found: ViewGradient, partial: Tensor | None, *, alone: bool
) -> Tensor:
    """Add the gradient of a part to a sum of gradients. The bits are those of adding its whole
    gradient, whose zeros turn -0 into +0, without a pass over the whole parameter for each part.
    ``alone``: no other gradient follows, if there is no sum so far."""
    if partial is None:
        total = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
        part = found.view.view_of(total)
        (part.copy_ if alone else part.add_)(found.grad)
        return total
    found.view.view_of(partial).add_(found.grad)
    return partial


def accumulate_gradient(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add a gradient to ``parameter.grad``, in the form that autograd gives it."""
    if parameter.grad is None:
        parameter.grad = to_grad_form(parameter, grad)
    else:
        parameter.grad.add_(grad.to(grad_dtype(parameter)))
    notify_gradient_written(parameter)
