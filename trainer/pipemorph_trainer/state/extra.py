"""What a rank saves beside its stage: objects of the user, and its random state.

Each rank saves its own. In a mesh of another shape, a rank that no rank was before gets the user's
objects of the nearest one, and keeps its own random state.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from pipemorph.api.mesh import COLUMN, DATA, DIMENSIONS, Coordinate
from pipemorph.errors import InputError

_RANDOM = "pipemorph.random"
_STATE = "pipemorph.state"


class Extra:
    """The ``state`` of one rank, by name: objects with ``state_dict`` and ``load_state_dict``.

    Raises :class:`InputError` if an object has no such methods.
    """

    def __init__(
        self, state: Mapping[str, Any], coordinate: Coordinate, device: torch.device
    ) -> None:
        for name, value in state.items():
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise InputError(
                    f"state has {name!r}, a {type(value).__name__}; expected an object with "
                    "state_dict and load_state_dict"
                )
        self._state, self._coordinate, self._device = state, coordinate, device

    def pack(self) -> dict[str, Tensor]:
        """The state as bytes, by key in a checkpoint."""
        mine = self._coordinate
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["device"] = torch.cuda.get_rng_state(self._device)
        packed = {_key(_RANDOM, mine): _packed((dict(mine.mesh.sizes), random))}
        for name, value in self._state.items():
            packed[_key(f"{_STATE}.{name}", mine)] = _packed(value.state_dict())
        return packed

    def chosen(
        self, saved: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    ) -> dict[str, Tensor]:
        """Empty tensors for what this rank gets of a checkpoint with the metadata ``saved``, by
        key."""
        wanted = {_RANDOM: _key(_RANDOM, self._coordinate)}
        for name in self._state:
            wanted[name] = self._nearest(f"{_STATE}.{name}", saved)
        found = {}
        for key in wanted.values():
            entry = saved.get(key)
            if isinstance(entry, TensorStorageMetadata):
                found[key] = torch.empty(entry.size, dtype=torch.uint8)
        return found

    def _nearest(self, kind: str, saved: Collection[str]) -> str:
        """The key of this rank, or else of the nearest one that saved."""
        keys = [_key(kind, place) for place in self._candidates()]
        return next((key for key in keys if key in saved), keys[0])

    def _candidates(self) -> Iterator[Coordinate]:
        """This rank and others, nearest first: stages of its column, of one with the same data,
        and of the first column."""
        mine = self._coordinate
        for names in ((), set(COLUMN) - set(DATA), COLUMN):
            near = mine.mesh.coordinate(mine.first_along(names))
            for stage in range(mine.stage, -1, -1):
                yield mine.mesh.coordinate(near.at_stage(stage))

    def unpack(self, packed: Mapping[str, Tensor]) -> None:
        """Give the loaded state to its objects. Names that were not saved keep what they have."""
        mine = self._coordinate
        for name, value in self._state.items():
            key = self._nearest(f"{_STATE}.{name}", packed)
            if key in packed:
                value.load_state_dict(_unpacked(packed[key]))
        key = _key(_RANDOM, mine)
        if key not in packed:
            return
        shape, random = _unpacked(packed[key])
        if shape != mine.mesh.sizes:
            return
        torch.set_rng_state(random["cpu"])
        if "device" in random and self._device.type == "cuda":
            torch.cuda.set_rng_state(random["device"], self._device)


def _key(kind: str, place: Coordinate) -> str:
    return ".".join([kind, *(f"{name}{place.along(name)}" for name in DIMENSIONS)])


def _packed(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(value: Tensor) -> Any:
    # As torch's checkpoints do with what is no tensor: a state may have objects of any type.
    return torch.load(io.BytesIO(value.numpy().tobytes()), map_location="cpu", weights_only=False)
