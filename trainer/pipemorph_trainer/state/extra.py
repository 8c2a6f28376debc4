"""What a rank saves beside its stage: objects of the user, and its random state.

Each rank saves its own. In a mesh of another shape, a rank that no rank was before gets the user's
objects of the nearest one, and keeps its own random state.

What is saved before an iteration has to be as it was before the iteration's batch was drawn, which
is before :meth:`Pipeline.step`. So random state, and objects that batches are drawn from, are taken
at the end of the iteration before (:meth:`Extra.mark`). Others, such as learning-rate schedulers,
change after it, and are taken when they are saved.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph.api.mesh import COLUMN, DATA, DIMENSIONS, Coordinate
from pipemorph.errors import InputError
from pipemorph_trainer.state.users import follow_groups, why_fixed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

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
        self.names = sorted(state)
        self._sources = {name for name, value in state.items() if _is_source(value)}
        """Names of objects that batches are drawn from."""
        self._marked: dict[str, bytes] = {}
        self._marked_random: dict[str, Tensor] | None = None

    def why_fixed(
        self, optimizer: torch.optim.Optimizer | None, parameters: Collection[str]
    ) -> str:
        """Why these objects cannot go along to another part; empty if they can. ``parameters``:
        names of the stage's."""
        return why_fixed(self._state, optimizer, parameters, self._sources)

    def follow_groups(self) -> None:
        """See :func:`~.users.follow_groups`."""
        follow_groups(self._state)

    def saved_names(self, saved: Collection[str]) -> set[str]:
        """The names of such objects, of all ranks, in a checkpoint with these keys."""
        mine = f"{_STATE}."
        return {
            key.removeprefix(mine).rsplit(".", len(DIMENSIONS))[0]
            for key in saved
            if key.startswith(mine)
        }

    def mark(self) -> None:
        """Take what drawing the next batch changes, before it is drawn."""
        self._marked_random = self._random()
        self._marked = {name: _packed(self._state[name].state_dict()) for name in self._sources}

    def unmark(self) -> None:
        """Forget what :meth:`mark` has taken: another iteration runs."""
        self._marked, self._marked_random = {}, None

    def _random(self) -> dict[str, Tensor]:
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["device"] = torch.cuda.get_rng_state(self._device)
        return random

    def pack_objects(self) -> dict[str, bytes]:
        """The state of the user's objects, by their names."""
        return {
            name: self._marked.get(name) or _packed(value.state_dict())
            for name, value in self._state.items()
        }

    def unpack_objects(self, packed: Mapping[str, bytes]) -> None:
        """Give the state to the user's objects. Names that were not packed keep what they have."""
        for name, value in self._state.items():
            if name in packed:
                value.load_state_dict(_unpacked(packed[name]))

    def pack(self) -> dict[str, Tensor]:
        """The state as bytes, by key in a checkpoint."""
        mine = self._coordinate
        random = self._marked_random or self._random()
        packed = {_key(_RANDOM, mine): _packed((dict(mine.mesh.sizes), random))}
        for name, content in self.pack_objects().items():
            packed[_key(f"{_STATE}.{name}", mine)] = content
        return {
            key: torch.frombuffer(bytearray(content), dtype=torch.uint8)
            for key, content in packed.items()
        }

    def chosen(
        self, saved: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    ) -> dict[str, Tensor]:
        """Empty tensors for what this rank gets of a checkpoint with the metadata ``saved``, by
        key."""
        wanted = {_RANDOM: _key(_RANDOM, self._coordinate)}
        for name in self._state:
            wanted[name] = self._nearest(f"{_STATE}.{name}", saved)
        # Its import takes longer than that of torch.
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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
                value.load_state_dict(_unpacked(packed[key].numpy().tobytes()))
        key = _key(_RANDOM, mine)
        if key not in packed:
            return
        shape, random = _unpacked(packed[key].numpy().tobytes())
        if shape != mine.mesh.sizes:
            return
        torch.set_rng_state(random["cpu"])
        if "device" in random and self._device.type == "cuda":
            torch.cuda.set_rng_state(random["device"], self._device)


def _key(kind: str, place: Coordinate) -> str:
    return ".".join([kind, *(f"{name}{place.along(name)}" for name in DIMENSIONS)])


def _is_source(value: Any) -> bool:
    """Whether batches are drawn from an object: a loader, a sampler or an iterator."""
    if isinstance(value, (nn.Module, Mapping)):
        return False
    return hasattr(value, "__iter__") or hasattr(value, "__next__")


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    # As torch's checkpoints do with what is no tensor: a state may have objects of any type.
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
