"""Arguments of ``step``: splits them into microbatches, and detects changes of their shapes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn, tensor_split
from torch.utils._pytree import tree_map

from pipemorph.errors import InputError
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.autograd_internals import iterate_saved_tensors
from pipemorph_trainer.backward.microbatch_state import iterate_graph_nodes
from pipemorph_trainer.errors import ShapeError
from pipemorph_trainer.executor.stage_executor import MicrobatchInputs
from pipemorph_trainer.transport.message import TensorMeta

log = logging.getLogger("pipemorph.trainer")


def check_grad_mode(who: object) -> None:
    """Raise :class:`InputError` if torch records no gradients, which a step needs."""
    inference = torch.is_inference_mode_enabled()
    if torch.is_grad_enabled() and not inference:
        return
    how = "torch.inference_mode()" if inference else "torch.no_grad()"
    raise InputError(
        f"{who}: step() was called under {how}, but it needs gradients: call it outside, or call "
        "evaluate()"
    )


def split_batch(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], microbatches: int, what: str = "input"
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the positional and keyword arguments of each microbatch.

    Tensors, also in lists, tuples and dicts, are split along dimension 0; other values go to every
    microbatch. Raises :class:`ShapeError` if a tensor cannot be split evenly.
    """
    named = [(f"{what} {i}", value) for i, value in enumerate(args)]
    named += [(f"{what} {name!r}", value) for name, value in kwargs.items()]
    for name, value in named:
        for tensor in _tensors_in(value):
            if tensor.dim() == 0 or tensor.shape[0] % microbatches:
                raise ShapeError(
                    f"{name} has shape {list(tensor.shape)}; expected a first dimension that "
                    f"{microbatches} microbatches divide"
                )
    if all(type(value) in _PLAIN for _, value in named):
        cut = [_split_value(value, microbatches) for _, value in named]
        chunks = [tuple(values[k] for values in cut) for k in range(microbatches)]
        n = len(args)
        return [c[:n] for c in chunks], [dict(zip(kwargs, c[n:], strict=True)) for c in chunks]
    # Handles containers, distributed tensors and masks. The import takes longer than that of torch.
    from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

    cut_args, cut_kwargs = split_args_kwargs_into_chunks(args, dict(kwargs), microbatches)
    return list(cut_args), list(cut_kwargs)


_PLAIN = (Tensor, nn.Parameter, bool, int, float, str, type(None))


def _split_value(value: Any, microbatches: int) -> Sequence[Any]:
    if not isinstance(value, Tensor):
        return [value] * microbatches
    chunks = tensor_split(value, microbatches)
    if value.requires_grad and value.is_leaf:
        # As in torch: the backward reads the gradients of a stage's inputs.
        for chunk in chunks:
            chunk.retain_grad()
    return chunks


def join_microbatches(chunks: Sequence[Any] | None) -> Any:
    """Join the results of all microbatches: tensors along dimension 0, scalars are stacked, and any
    other value is that of the first. None if there are none."""
    if not chunks:
        return None

    def join_values(first: Any, *others: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        together = torch.cat if first.dim() else torch.stack
        return together([first, *others])

    return tree_map(join_values, *chunks)


@dataclass(frozen=True)
class StepArguments:
    """Arguments of ``step`` on a rank: whole batches, or with ``…_mbs`` lists of microbatches."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    arg_mbs: Sequence[Any] | None = None
    kwarg_mbs: Sequence[dict[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None
    weight: Any = None
    costs: Any = None
    evaluation: bool = False
    count: int | None = None
    """Number of microbatches in the lists; None: N."""

    @property
    def has_batch(self) -> bool:
        """True if any of a batch was given."""
        lists = self.arg_mbs, self.kwarg_mbs, self.target_mbs, self.target
        return bool(self.args or self.kwargs) or any(each is not None for each in lists)


def select_stage_inputs(
    coordinate: Coordinate, microbatches: int, given: StepArguments, *, needs_target: bool
) -> tuple[MicrobatchInputs, Any]:
    """Return the microbatches of the arguments that this stage uses, and their
    :func:`shape_signature`.

    Raises :class:`InputError` if an argument is missing or given twice, and :class:`ShapeError` if
    it cannot be split, or if microbatches on stage 0 differ in shape.
    """
    for name, whole, parts in (
        ("arg", bool(given.args), given.arg_mbs),
        ("kwarg", bool(given.kwargs), given.kwarg_mbs),
        ("target", given.target is not None, given.target_mbs),
    ):
        if parts is None:
            continue
        if whole:
            raise InputError(f"{coordinate}: step() got {name}_mbs and the same as one batch")
        if len(parts) != microbatches:
            raise ShapeError(
                f"{name}_mbs has {len(parts)} microbatches; expected {microbatches}, as the plan"
            )
    inputs = MicrobatchInputs()
    if given.kwarg_mbs is not None:
        inputs.kwargs = [dict(kwargs) for kwargs in given.kwarg_mbs]
    elif given.kwargs:
        inputs.kwargs = split_batch((), given.kwargs, microbatches)[1]
    if coordinate.is_first:
        if given.arg_mbs is not None:
            inputs.args = [
                tuple(a) if isinstance(a, (tuple, list)) else (a,) for a in given.arg_mbs
            ]
        elif given.args:
            inputs.args = split_batch(given.args, {}, microbatches)[0]
        elif not inputs.kwargs:
            raise InputError(f"{coordinate}: step() got no input; stage 0 needs the batch")
    if given.args and given.kwargs and coordinate.is_first:
        rows = {tensor.shape[0] for tensor in _tensors_in(given.args)}
        for name, value in given.kwargs.items():
            for tensor in _tensors_in(value):
                if tensor.shape[0] not in rows:
                    _warn_about_split(name, tuple(tensor.shape), microbatches)
    shapes = shape_signature((*inputs.args[:1], *inputs.kwargs[:1]))
    if coordinate.is_first and (given.arg_mbs is not None or given.kwarg_mbs is not None):
        _check_equal_shapes(inputs, shapes, microbatches)
    if coordinate.is_last:
        if given.target_mbs is not None:
            inputs.targets = list(given.target_mbs)
        elif given.target is not None:
            parts = split_batch((given.target,), {}, microbatches, "target")[0]
            inputs.targets = [part[0] for part in parts]
        elif needs_target:
            raise InputError(f"{coordinate}: step() got no target; loss_fn on this stage needs it")
        if given.weight is not None:
            inputs.divisor = _sum_weights(given.weight)
    return inputs, shapes


@cache
def _warn_about_split(name: str, shape: tuple[int, ...], microbatches: int) -> None:
    """Warn once that a keyword was split whose size is not that of the batch."""
    log.warning(
        "keyword %r has shape %s, which is not the batch's size; it is cut along dimension 0 into"
        " %d parts. If every microbatch needs all of it, give kwarg_mbs", name, list(shape),
        microbatches,
    )  # fmt: skip


def check_shared_graphs(who: object, inputs: MicrobatchInputs) -> None:
    """Raise :class:`InputError` if the backwards of two microbatches would run through one graph of
    the caller, which the first of them frees."""
    seen: dict[Any, int] = {}
    for k, values in enumerate(zip_longest(inputs.args, inputs.kwargs, inputs.targets)):
        roots = [tensor for tensor in _tensors_in(values) if tensor.grad_fn is not None]
        for node in iterate_graph_nodes(roots):
            first = seen.setdefault(node, k)
            if first != k and next(iterate_saved_tensors(node), None) is not None:
                raise InputError(
                    f"{who}: the inputs of microbatches {first} and {k} come from one graph"
                    f" ({type(node).__name__}), through which only one backward can run; give"
                    " x.detach(), or make what computes them part of the stage"
                )


def _check_equal_shapes(inputs: MicrobatchInputs, shapes: Any, microbatches: int) -> None:
    for k in range(1, microbatches):
        found = shape_signature((*inputs.args[k : k + 1], *inputs.kwargs[k : k + 1]))
        if found != shapes:
            raise ShapeError(
                f"microbatch {k} has {describe_shapes(found)}; expected {describe_shapes(shapes)} "
                "as microbatch 0: all microbatches need the same shapes"
            )


def _sum_weights(weight: Any) -> float:
    """Return the sum of a batch's weights. Raises :class:`InputError` unless it is above 0."""
    total = float(weight.sum()) if isinstance(weight, Tensor) else float(weight)
    if not 0 < total < math.inf:
        raise InputError(f"the sum of weight is {total:g}; expected a number above 0")
    return total


def shape_signature(value: Any) -> Any:
    """Return the signature of an argument: if it changes (``!=``), shapes of outputs may change."""
    if isinstance(value, Tensor):
        return TensorMeta.from_tensor(value)
    if isinstance(value, (list, tuple)):
        return tuple(shape_signature(inner) for inner in value)
    if isinstance(value, Mapping):
        return tuple((key, shape_signature(inner)) for key, inner in value.items())
    return type(value)


def describe_shapes(shapes: Any) -> str:
    """Describe a signature: the shapes of its tensors."""
    if isinstance(shapes, TensorMeta):
        return str(shapes)
    if isinstance(shapes, tuple):
        return ", ".join(filter(None, map(describe_shapes, shapes)))
    return ""


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner)
