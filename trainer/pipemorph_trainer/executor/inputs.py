"""Splits the arguments of ``step`` into microbatches, and detects changes of shapes."""

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

from pipemorph.api.mesh import Coordinate
from pipemorph.errors import InputError
from pipemorph_trainer.errors import ShapeError
from pipemorph_trainer.executor.dispatch import Inputs
from pipemorph_trainer.executor.split.flight import nodes_below
from pipemorph_trainer.executor.torch_private import saved_tensors
from pipemorph_trainer.links.message import TensorMeta

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


def split(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], microbatches: int, what: str = "input"
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Positional and keyword arguments of each microbatch.

    Tensors, including those in lists, tuples and dicts, are split along dimension 0; other values
    go to every microbatch. Raises :class:`ShapeError` if a tensor cannot be split evenly.
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
        cut = [_chunks(value, microbatches) for _, value in named]
        chunks = [tuple(values[k] for values in cut) for k in range(microbatches)]
        n = len(args)
        return [c[:n] for c in chunks], [dict(zip(kwargs, c[n:], strict=True)) for c in chunks]
    # Handles containers, distributed tensors and masks. Imported only if needed, since that takes
    # longer than to import torch.
    from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

    cut_args, cut_kwargs = split_args_kwargs_into_chunks(args, dict(kwargs), microbatches)
    return list(cut_args), list(cut_kwargs)


_PLAIN = (Tensor, nn.Parameter, bool, int, float, str, type(None))


def _chunks(value: Any, microbatches: int) -> Sequence[Any]:
    if not isinstance(value, Tensor):
        return [value] * microbatches
    chunks = tensor_split(value, microbatches)
    if value.requires_grad and value.is_leaf:
        # Like torch: the backward reads the gradients of a stage's inputs.
        for chunk in chunks:
            chunk.retain_grad()
    return chunks


def join(chunks: Sequence[Any] | None) -> Any:
    """The results of all microbatches as one: tensors are joined along dimension 0, scalars are
    stacked, and of other values the first is taken. None if there are none."""
    if not chunks:
        return None

    def joined(first: Any, *others: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        together = torch.cat if first.dim() else torch.stack
        return together([first, *others])

    return tree_map(joined, *chunks)


@dataclass(frozen=True)
class Given:
    """What a rank gives to ``step``. It is split here, unless it is given as microbatches."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    arg_mbs: Sequence[Any] | None = None
    kwarg_mbs: Sequence[dict[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None
    weight: Any = None
    evaluation: bool = False


def of_stage(
    coordinate: Coordinate, microbatches: int, given: Given, *, needs_target: bool
) -> tuple[Inputs, Any]:
    """Microbatches of the arguments that this stage uses, and the signature of their shapes.

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
    inputs = Inputs()
    if given.kwarg_mbs is not None:
        inputs.kwargs = [dict(kwargs) for kwargs in given.kwarg_mbs]
    elif given.kwargs:
        inputs.kwargs = split((), given.kwargs, microbatches)[1]
    if coordinate.first:
        if given.arg_mbs is not None:
            inputs.args = [
                tuple(a) if isinstance(a, (tuple, list)) else (a,) for a in given.arg_mbs
            ]
        elif given.args:
            inputs.args = split(given.args, {}, microbatches)[0]
        elif not inputs.kwargs:
            raise InputError(f"{coordinate}: step() got no input; stage 0 needs the batch")
    if given.args and given.kwargs and coordinate.first:
        rows = {tensor.shape[0] for tensor in _tensors_in(given.args)}
        for name, value in given.kwargs.items():
            for tensor in _tensors_in(value):
                if tensor.shape[0] not in rows:
                    _say_cut(name, tuple(tensor.shape), microbatches)
    shapes = signature((*inputs.args[:1], *inputs.kwargs[:1]))
    if coordinate.first and (given.arg_mbs is not None or given.kwarg_mbs is not None):
        _check_alike(inputs, shapes, microbatches)
    if coordinate.last:
        if given.target_mbs is not None:
            inputs.targets = list(given.target_mbs)
        elif given.target is not None:
            parts = split((given.target,), {}, microbatches, "target")[0]
            inputs.targets = [part[0] for part in parts]
        elif needs_target:
            raise InputError(f"{coordinate}: step() got no target; loss_fn on this stage needs it")
        if given.weight is not None:
            inputs.divisor = _total(given.weight)
    return inputs, shapes


@cache
def _say_cut(name: str, shape: tuple[int, ...], microbatches: int) -> None:
    """Say once that a keyword was cut which does not look like a part of the batch."""
    log.warning(
        "keyword %r has shape %s, which is not the batch's size; it is cut along dimension 0 into"
        " %d parts. If every microbatch needs all of it, give kwarg_mbs", name, list(shape),
        microbatches,
    )  # fmt: skip


def check_graphs(who: object, inputs: Inputs) -> None:
    """Raise :class:`InputError` if the backwards of two microbatches would run through one graph of
    the caller's, which the first of them frees."""
    seen: dict[Any, int] = {}
    for k, values in enumerate(zip_longest(inputs.args, inputs.kwargs, inputs.targets)):
        roots = [tensor for tensor in _tensors_in(values) if tensor.grad_fn is not None]
        for node in nodes_below(roots):
            first = seen.setdefault(node, k)
            if first != k and next(saved_tensors(node), None) is not None:
                raise InputError(
                    f"{who}: the inputs of microbatches {first} and {k} come from one graph"
                    f" ({type(node).__name__}), through which only one backward can run; give"
                    " x.detach(), or make what computes them part of the stage"
                )


def _check_alike(inputs: Inputs, shapes: Any, microbatches: int) -> None:
    for k in range(1, microbatches):
        found = signature((*inputs.args[k : k + 1], *inputs.kwargs[k : k + 1]))
        if found != shapes:
            raise ShapeError(
                f"microbatch {k} has {in_words(found)}; expected {in_words(shapes)} as microbatch "
                "0: all microbatches need the same shapes"
            )


def _total(weight: Any) -> float:
    """The sum of the weights of a batch. Raises :class:`InputError` unless it is above 0."""
    total = float(weight.sum()) if isinstance(weight, Tensor) else float(weight)
    if not 0 < total < math.inf:
        raise InputError(f"the sum of weight is {total:g}; expected a number above 0")
    return total


def signature(value: Any) -> Any:
    """Signature of an argument: if it changes (``!=``), the shapes of outputs may change."""
    if isinstance(value, Tensor):
        return TensorMeta.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(signature(inner) for inner in value)
    if isinstance(value, Mapping):
        return tuple((key, signature(inner)) for key, inner in value.items())
    return type(value)


def in_words(shapes: Any) -> str:
    """A signature in words: the shapes of its tensors."""
    if isinstance(shapes, TensorMeta):
        return str(shapes)
    if isinstance(shapes, tuple):
        return ", ".join(filter(None, map(in_words, shapes)))
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
