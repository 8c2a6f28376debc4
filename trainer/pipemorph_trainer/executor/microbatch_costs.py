"""Costs of a batch's microbatches: how long their ops take, compared with each other; and the order
in which they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pipemorph.errors import InputError, one_line

Value = TypeVar("Value")
CostFunction = Callable[..., Any]
"""``cost_fn(*args, **kwargs)`` → cost of one microbatch, or lengths of its samples, from its
arguments on stage 0."""
MOST_COSTS = 4096
"""Most microbatches with costs: the token that starts an iteration carries one for each."""

MOST_COST = 1e30
MOST_LENGTH = 1e9


class SampleSizes(NamedTuple):
    """Sizes of a microbatch's samples: sum of their lengths, and of their squares."""

    tokens: float
    squares: float


class MicrobatchWork(NamedTuple):
    """Work of an iteration: ``costs`` of the microbatches, empty if unknown, and ``order[k]``, the
    microbatch that runs in place *k* on all stages; empty: microbatch *k*."""

    costs: tuple[float, ...] = ()
    order: tuple[int, ...] = ()

    def to_places(self, values: Sequence[Value]) -> Sequence[Value]:
        """Sort values of microbatches, if there are any, by place."""
        return [values[m] for m in self.order] if self.order and values else values

    def to_microbatches(self, values: Sequence[Value]) -> Sequence[Value]:
        """Sort values of places, if there are any, by microbatch."""
        if not self.order or not values:
            return values
        return [value for _, value in sorted(zip(self.order, values, strict=True), key=_get_number)]


NO_COSTS = MicrobatchWork()
"""Work of microbatches that run in order, without costs."""


def _get_number(pair: tuple[int, Any]) -> int:
    return pair[0]


def read_costs(
    costs: Any, microbatches: int, name: str = "costs"
) -> tuple[float, ...] | tuple[SampleSizes, ...]:
    """Return the costs that a caller gave, one per microbatch: a sequence, or a tensor; or the
    sizes of the microbatches, for which the caller gave a sequence of lengths each.

    Raises :class:`InputError` unless costs are from 0 to 1e30, lengths from 0 to 1e9, and not all
    0. ``name``: of the argument, for the error.
    """
    if microbatches > MOST_COSTS:
        raise InputError(
            f"{name} are for at most {MOST_COSTS} microbatches, and the plan has {microbatches};"
            " leave them out"
        )
    values = costs.tolist() if hasattr(costs, "tolist") else costs
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise InputError(
            f"{name} is a {type(costs).__name__}; expected {microbatches} numbers, one per"
            " microbatch"
        )
    if len(values) != microbatches:
        raise InputError(
            f"{name} has {len(values)} numbers; expected {microbatches}, one per microbatch"
        )
    rows = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    if all(isinstance(row, (list, tuple)) for row in rows):
        sizes = tuple(_read_lengths(row, f"{name}[{k}]") for k, row in enumerate(rows))
        if not any(size.tokens for size in sizes):
            raise InputError(f"{name} are lengths that are all 0; expected at least one above 0")
        return sizes
    found = tuple(_read_cost(value, f"{name}[{k}]") for k, value in enumerate(rows))
    if not any(found):
        raise InputError(f"{name} are all 0; expected at least one above 0")
    return found


def compute_costs(
    cost_fn: CostFunction,
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[Mapping[str, Any]],
    microbatches: int,
) -> tuple[float, ...] | tuple[SampleSizes, ...]:
    """Compute the costs of stage 0's microbatches, or their sizes, see :func:`read_costs`. Raises
    :class:`InputError` if the function fails, or if what it returns is no cost."""
    found = []
    for k in range(microbatches):
        try:
            found.append(cost_fn(*(args[k] if args else ()), **(kwargs[k] if kwargs else {})))
        except Exception as error:
            what = one_line(f"{type(error).__name__}: {error}", 200)
            raise InputError(f"cost_fn raised {what} for microbatch {k}") from error
    return read_costs(found, microbatches, "the results of cost_fn")


def _read_lengths(row: Sequence[Any], name: str) -> SampleSizes:
    lengths = [_read_cost(value, f"{name}[{i}]", MOST_LENGTH) for i, value in enumerate(row)]
    return SampleSizes(math.fsum(lengths), math.fsum(each * each for each in lengths))


def _read_cost(value: Any, name: str, most: float = MOST_COST) -> float:
    try:
        cost = float(value)
        shown = f"{cost:g}"
    except (TypeError, ValueError, RuntimeError):
        cost, shown = math.nan, one_line(repr(value), 80)
    if not 0 <= cost <= most:
        raise InputError(f"{name} is {shown}; expected a number from 0 to {most:g}")
    return cost
