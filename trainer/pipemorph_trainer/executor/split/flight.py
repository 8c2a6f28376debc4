"""State of one microbatch between its F and its W, and the call of the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.stages.structure import SINGLE, Structure, take_apart
from pipemorph_trainer.executor.torch_private import version
from pipemorph_trainer.topology.placement import is_dtensor

if TYPE_CHECKING:
    from pipemorph_trainer.executor.offload.store import ActivationStore, SavedFlight

LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(output, target) -> scalar``; ``output``: the result of the last stage."""

Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Edge:
    """An output without its memory, sufficient for a backward."""

    edge: GradientEdge
    shape: torch.Size
    requires_grad = True

    @staticmethod
    def of(out: Tensor) -> Edge:
        return Edge(get_gradient_edge(out), out.shape)


Root = Any
"""Start of a backward: a tensor or a GradientEdge. torch accepts lists with both; its stubs require
one kind per list."""


@dataclass
class Flight:
    """State of one microbatch on one stage.

    ``leaves[j]``: positional argument *j* as an autograd leaf, None if it needs no gradient.
    ``outputs``: the stage's outputs (or the scaled loss), with their graph until B frees it.
    ``work``: data that the splitter keeps from B to W. ``saved``: tensors that can be moved to host
    memory.
    """

    microbatch: int
    leaves: Grads = ()
    outputs: tuple[Tensor | Edge, ...] = ()
    work: Any = None
    sent: tuple[Tensor, ...] = field(default=(), repr=False)
    saved: SavedFlight | None = field(default=None, repr=False)

    def leave(self, store: ActivationStore, *, keep_outputs: bool) -> int:
        """Move the activations to host memory. Returns the bytes moved.

        Only the graph edges of the outputs are kept, so that their memory is freed when they have
        been sent. ``keep_outputs``: keep them, for a loss, from which the backward starts.
        """
        assert self.saved is not None
        if not keep_outputs:
            self.outputs = tuple(
                Edge.of(out) if isinstance(out, Tensor) and out.grad_fn is not None else out
                for out in self.outputs
            )
        moved = store.offload(self.saved, self.leaves, self.sent)
        self.sent = ()
        return moved

    def roots(self, output_grads: Sequence[Tensor | None] | None) -> tuple[list[Root], Any]:
        """Outputs that take part in the backward, and their gradients.

        ``output_grads``: None on the last stage, where the only root is the loss. Raises
        :class:`SplitError` if the gradients do not match the outputs.
        """
        if output_grads is None:
            return [_root(out) for out in self.outputs if out.requires_grad], None
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
            tensors.append(_root(out))
            grads.append(grad)
        return tensors, grads

    def take_input_grads(self, output_grads: Sequence[Tensor | None] | None) -> Grads:
        """Gradients of the positional arguments, moved out of the leaves. One that only passes
        through the stage gets memory of its own: it is sent while that of ``output_grads`` is used
        again."""
        came = {grad.data_ptr() for grad in output_grads or () if grad is not None}
        grads = []
        for leaf in self.leaves:
            grad = None
            if leaf is not None:
                grad, leaf.grad = leaf.grad, None
                if grad is not None and grad.layout is torch.strided and grad.data_ptr() in came:
                    grad = grad.clone()
            grads.append(grad)
        return tuple(grads)


def _apart(out: Tensor) -> Tensor:
    """The tensor without its graph. ``requires_grad`` says whether it needs a gradient."""
    return out.detach().requires_grad_(out.requires_grad)


def _root(out: Tensor | Edge) -> Root:
    return out.edge if isinstance(out, Edge) else out


def nodes_below(roots: Iterable[Root]) -> Iterator[Any]:
    """The nodes of a graph, each once."""
    seen: set[Any] = set()
    stack = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(below for below, _ in node.next_functions)


class StageCall:
    """Calls a stage for one microbatch, with inputs that are detached from earlier graphs.

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
        self.received: Structure | None = None
        """How the module gets its positional arguments; None: as they are."""
        self.structure = SINGLE
        """Of the outputs of the newest call."""
        self.needed: Sequence[bool] | None = None
        """Which positional arguments need a gradient; None: all floating-point ones."""
        self.outputs: list[Any] | None = None
        """Gets what the last stage returns; None: it is not kept."""
        self.writes_input: bool | None = None
        """Whether the stage writes to its inputs in place, so that it gets copies; None before its
        first call, which gets copies, too."""

    def __call__(
        self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None, target: Any
    ) -> Flight:
        """Run the forward. Raises :class:`SplitError` if its results cannot be sent."""
        leaves: Grads = (None,) * len(args)
        inputs: list[Any] = list(args)
        if not self.is_first:
            leaves = tuple(self._leaf(index, arg) for index, arg in enumerate(args))
        with torch.enable_grad():
            for index, leaf in enumerate(leaves):
                if leaf is not None:
                    # Not the leaf itself: autocast casts a leaf once for all its uses.
                    as_is = self.writes_input is False
                    inputs[index] = leaf.view_as(leaf) if as_is else leaf.clone()
            output = self._run(inputs, kwargs)
            if self.writes_input is None:
                copies = [x for x, leaf in zip(inputs, leaves, strict=False) if leaf is not None]
                self.writes_input = any(version(copy) for copy in copies)
            if not self.is_last:
                outputs: tuple[Tensor, ...]
                if type(output) is Tensor:
                    outputs, self.structure = (output,), SINGLE
                else:
                    outputs, self.structure = take_apart(output)
                return Flight(microbatch, leaves, outputs, sent=tuple(map(_apart, outputs)))
            loss = self._loss(output, target)
            self._keep(output)
            return Flight(microbatch, leaves, (loss / self.divisor,), sent=(loss.detach(),))

    def evaluate(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, target: Any
    ) -> tuple[Tensor, ...]:
        """Run the forward without gradients. Returns the outputs to send, or the loss: NaN if there
        is no target for ``loss_fn``."""
        with torch.no_grad():
            output = self._run(args, kwargs)
            if not self.is_last:
                outputs, self.structure = take_apart(output)
                return tuple(out.detach() for out in outputs)
            self._keep(output)
            if target is None and self.loss_fn is not None:
                return (torch.tensor(torch.nan),)
            return (self._loss(output, target),)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        named = dict(kwargs or {})
        if self.received is not None:
            args, received = self.received.arguments(args)
            if twice := received.keys() & named.keys():
                raise SplitError(
                    f"the stage gets {min(twice)!r} from the stage above and from the keyword "
                    "arguments of this rank; give it once"
                )
            named |= received
        return self.module(*args, **named)

    def _keep(self, output: Any) -> None:
        if self.outputs is not None:
            self.outputs.append(tree_map_only(Tensor, Tensor.detach, output))

    def _leaf(self, index: int, arg: Any) -> Tensor | None:
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

    def _loss(self, output: Any, target: Any) -> Tensor:
        loss = output if self.loss_fn is None else self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            source = "the last stage" if self.loss_fn is None else "loss_fn"
            raise SplitError(f"{source} returned {what}; expected a scalar loss")
        if is_dtensor(loss):
            source = "the last stage" if self.loss_fn is None else "loss_fn"
            raise SplitError(f"{source} returned a DTensor; return loss.full_tensor()")
        return loss
