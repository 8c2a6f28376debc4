"""Dimensions of the job's mesh along which a tensor is distributed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from pipemorph.errors import InputError
from pipemorph.spec.mesh import DIMENSIONS, Coordinate, Dimension


class TensorPlacement(NamedTuple):
    """Dimensions of the job's mesh, in the order of :data:`~pipemorph.spec.mesh.DIMENSIONS`.

    ``spanned``: those of the tensor's own mesh; the library that distributed the tensor keeps it
    and its gradients consistent along them. ``sharded``: those along which ranks hold different
    elements. Both are empty for a plain tensor.
    """

    spanned: tuple[Dimension, ...] = ()
    sharded: tuple[Dimension, ...] = ()


def get_loaded_class(module: str, name: str) -> type | tuple[()]:
    """Return a class that is slow to import; if it was never imported, it has no instances."""
    found: type | tuple[()] = getattr(sys.modules.get(module), name, ())
    return found


def is_dtensor(value: object) -> bool:
    """True if a tensor is distributed, for example by ``fully_shard``, ``parallelize_module``."""
    return isinstance(value, get_loaded_class("torch.distributed.tensor", "DTensor"))


def to_local(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached. It shares the tensor's memory."""
    value = value.detach()
    part: Tensor = value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]
    return part


def has_misplaced_gradient(parameter: Tensor) -> bool:
    """True if a parameter's gradient is distributed otherwise than the parameter: autograd does not
    redistribute the results of the backward's ops."""
    grad: Any = parameter.grad
    if grad is None or not (is_dtensor(grad) and is_dtensor(parameter)):
        return False
    wanted: Any = parameter
    return bool(grad.placements != wanted.placements)


def find_placement(name: str, value: Tensor, coordinate: Coordinate) -> TensorPlacement:
    """Find the placement of a parameter. Raises :class:`InputError` if ranks of other stages have a
    part of it, or if it is a partial sum."""
    if not is_dtensor(value):
        return TensorPlacement()
    distributed: Any = value
    try:
        return _compute_placement(distributed.device_mesh, distributed.placements, coordinate)
    except InputError as error:
        raise InputError(f"parameter {name!r} of the stage {error}") from None


def describe_shard(value: Tensor, coordinate: Coordinate) -> str:
    """Describe this rank's part of a tensor for messages: ``, Shard(dim=0) over tp``; empty for a
    whole tensor. Two tensors of a shape have equal texts if ranks at the same place in the mesh
    hold the same part of both."""
    if not is_dtensor(value):
        return ""
    distributed: Any = value
    mesh, mine = distributed.device_mesh, distributed.device_mesh.get_coordinate()
    text = ""
    for dim, kind in enumerate(distributed.placements):
        along = _sort_dimensions(_find_dimensions(_list_ranks_along(mesh, mine, dim), coordinate))
        if along and not kind.is_replicate():
            text += f", {kind!r} over {' × '.join(along)}"
    return text


def _list_ranks_along(mesh: Any, mine: Sequence[int], dim: int) -> list[int]:
    """List the ranks along a dimension of torch's mesh whose other coordinates are ``mine``."""
    index = tuple(slice(None) if i == dim else place for i, place in enumerate(mine))
    ranks: list[int] = mesh.mesh[index].tolist()
    return ranks


@lru_cache
def _compute_placement(
    mesh: Any, kinds: tuple[Any, ...], coordinate: Coordinate
) -> TensorPlacement:
    mine = mesh.get_coordinate()
    spanned: set[Dimension] = set()
    sharded: set[Dimension] = set()
    for dim, kind in enumerate(kinds):
        if kind.is_partial():
            raise InputError(f"is a partial sum ({kind}); redistribute it")
        along = _find_dimensions(_list_ranks_along(mesh, mine, dim), coordinate)
        if "pp" in along:
            raise InputError(
                "is distributed over ranks of other stages; use a mesh of one stage, such as "
                "mesh['dp_shard'] or mesh['tp'] of make_mesh()"
            )
        spanned |= along
        if not kind.is_replicate():
            sharded |= along
    return TensorPlacement(_sort_dimensions(spanned), _sort_dimensions(sharded))


def _find_dimensions(ranks: list[int], coordinate: Coordinate) -> set[Dimension]:
    """Find the dimensions of the job's mesh in which these ranks differ from this one."""
    others = [coordinate.mesh.find_coordinate(rank) for rank in ranks]
    return {
        name
        for name in DIMENSIONS
        if any(other.index_along(name) != coordinate.index_along(name) for other in others)
    }


def _sort_dimensions(names: set[Dimension]) -> tuple[Dimension, ...]:
    return tuple(name for name in DIMENSIONS if name in names)
