"""Along which dimensions of the job's mesh a tensor is distributed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from pipemorph.api.mesh import DIMENSIONS, Coordinate, Dimension
from pipemorph.errors import InputError


class Placement(NamedTuple):
    """Dimensions of the job's mesh, in the order of :data:`~pipemorph.api.mesh.DIMENSIONS`.

    ``spanned``: those of the tensor's own mesh; whoever distributed it keeps its ranks along them
    right, gradients too. ``sharded``: those along which ranks hold different elements. Both are
    empty for a plain tensor.
    """

    spanned: tuple[Dimension, ...] = ()
    sharded: tuple[Dimension, ...] = ()


def loaded(module: str, name: str) -> type | tuple[()]:
    """A class that is slow to import. If it was never imported, there are no instances of it."""
    found: type | tuple[()] = getattr(sys.modules.get(module), name, ())
    return found


def is_dtensor(value: object) -> bool:
    """Whether a tensor is distributed, as ``fully_shard`` and ``parallelize_module`` make them."""
    return isinstance(value, loaded("torch.distributed.tensor", "DTensor"))


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor, without its history. Shares its memory."""
    value = value.detach()
    part: Tensor = value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]
    return part


def misplaced(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient that is not distributed as it is: autograd leaves it as
    the ops of the backward made it."""
    grad: Any = parameter.grad
    if grad is None or not (is_dtensor(grad) and is_dtensor(parameter)):
        return False
    wanted: Any = parameter
    return bool(grad.placements != wanted.placements)


def placement(name: str, value: Tensor, coordinate: Coordinate) -> Placement:
    """Where a parameter is distributed. Raises :class:`InputError` if ranks of other stages have a
    part of it, or if it is a partial sum."""
    if not is_dtensor(value):
        return Placement()
    distributed: Any = value
    try:
        return _placement(distributed.device_mesh, distributed.placements, coordinate)
    except InputError as error:
        raise InputError(f"parameter {name!r} of the stage {error}") from None


def described(value: Tensor, coordinate: Coordinate) -> str:
    """Which part of a tensor this rank holds, for messages: ``, Shard(dim=0) over tp``. The same
    for two tensors of one shape if ranks with the same place in the mesh hold the same part of
    both. Empty for a whole tensor."""
    if not is_dtensor(value):
        return ""
    distributed: Any = value
    mesh, mine = distributed.device_mesh, distributed.device_mesh.get_coordinate()
    text = ""
    for dim, kind in enumerate(distributed.placements):
        along = _ordered(_along(_line(mesh, mine, dim), coordinate))
        if along and not kind.is_replicate():
            text += f", {kind!r} over {' × '.join(along)}"
    return text


def _line(mesh: Any, mine: Sequence[int], dim: int) -> list[int]:
    """The ranks along a dimension of torch's mesh that share the others with ``mine``."""
    index = tuple(slice(None) if i == dim else place for i, place in enumerate(mine))
    ranks: list[int] = mesh.mesh[index].tolist()
    return ranks


@lru_cache
def _placement(mesh: Any, kinds: tuple[Any, ...], coordinate: Coordinate) -> Placement:
    mine = mesh.get_coordinate()
    spanned: set[Dimension] = set()
    sharded: set[Dimension] = set()
    for dim, kind in enumerate(kinds):
        if kind.is_partial():
            raise InputError(f"is a partial sum ({kind}); redistribute it")
        along = _along(_line(mesh, mine, dim), coordinate)
        if "pp" in along:
            raise InputError(
                "is distributed over ranks of other stages; use a mesh of one stage, such as "
                "mesh['dp_shard'] or mesh['tp'] of make_mesh()"
            )
        spanned |= along
        if not kind.is_replicate():
            sharded |= along
    return Placement(_ordered(spanned), _ordered(sharded))


def _along(ranks: list[int], coordinate: Coordinate) -> set[Dimension]:
    """The dimensions in which these ranks differ from this one."""
    others = [coordinate.mesh.coordinate(rank) for rank in ranks]
    return {
        name
        for name in DIMENSIONS
        if any(other.along(name) != coordinate.along(name) for other in others)
    }


def _ordered(names: set[Dimension]) -> tuple[Dimension, ...]:
    return tuple(name for name in DIMENSIONS if name in names)
