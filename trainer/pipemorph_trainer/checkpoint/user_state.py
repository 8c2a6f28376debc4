"""State of a rank apart from its stage: objects of the user, and random state.

Each rank saves its own. In a mesh of another shape, a rank without saved objects gets those of the
nearest rank that has them, and its random state does not change.

The state saved before an iteration must be from before the iteration's batch was drawn, and so from
before :meth:`Pipeline.step`. So random state and the objects that yield batches are captured at the
end of the previous iteration (:meth:`UserState.capture_batch_state`). Other objects, such as
learning-rate schedulers, still change after it, and are read when they are saved.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph.errors import InputError
from pipemorph.spec.mesh import COLUMN_DIMENSIONS, DATA_DIMENSIONS, DIMENSIONS, Coordinate
from pipemorph_trainer.checkpoint.movable_state import adopt_learning_rates, find_move_obstacle

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

_RANDOM = "pipemorph.random"
_STATE = "pipemorph.state"
OWN_NAMES = "pipemorph."
"""Beginning of the names of objects that are not the user's. A checkpoint may lack them."""


class UserState:
    """User objects (``state=``) of a rank, by name, with ``state_dict`` and ``load_state_dict``,
    and objects of the pipeline, whose names begin with :data:`OWN_NAMES`.

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
        self.names = sorted(name for name in state if not name.startswith(OWN_NAMES))
        self._sources = {name for name, value in state.items() if _yields_batches(value)}
        """Names of objects that yield batches."""
        self._marked: dict[str, bytes] = {}
        self._marked_random: dict[str, Tensor] | None = None

    def find_move_obstacle(
        self, optimizer: torch.optim.Optimizer | None, parameters: Collection[str]
    ) -> str:
        """Explain why these objects do not fit another part of the model; empty if they do.
        ``parameters``: names of the stage's parameters."""
        return find_move_obstacle(self._state, optimizer, parameters, self._sources)

    def adopt_learning_rates(self) -> None:
        """Apply :func:`.movable_state.adopt_learning_rates` to these objects."""
        adopt_learning_rates(self._state)

    def list_saved_names(self, saved: Collection[str]) -> set[str]:
        """List the names of user objects, of all ranks, in a checkpoint with these keys."""
        mine = f"{_STATE}."
        names = {
            key.removeprefix(mine).rsplit(".", len(DIMENSIONS))[0]
            for key in saved
            if key.startswith(mine)
        }
        return {name for name in names if not name.startswith(OWN_NAMES)}

    def capture_batch_state(self) -> None:
        """Capture the state that drawing the next batch changes."""
        self._marked_random = self._read_random_state()
        self._marked = {
            name: _serialize_object(self._state[name].state_dict()) for name in self._sources
        }

    def discard_batch_state(self) -> None:
        """Forget the state of :meth:`capture_batch_state`: the next iteration has begun."""
        self._marked, self._marked_random = {}, None

    def _read_random_state(self) -> dict[str, Tensor]:
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["device"] = torch.cuda.get_rng_state(self._device)
        return random

    def pack_objects(self) -> dict[str, bytes]:
        """Serialize the state of the user's objects, by name."""
        return {
            name: self._marked.get(name) or _serialize_object(value.state_dict())
            for name, value in self._state.items()
        }

    def unpack_objects(self, packed: Mapping[str, bytes]) -> None:
        """Load packed state into the user's objects. Objects without packed state do not change."""
        for name, value in self._state.items():
            if name in packed:
                value.load_state_dict(_deserialize_object(packed[name]))

    def pack_tensors(self) -> dict[str, Tensor]:
        """Serialize objects and random state into byte tensors, by key in a checkpoint."""
        mine = self._coordinate
        random = self._marked_random or self._read_random_state()
        packed = {_make_rank_key(_RANDOM, mine): _serialize_object((dict(mine.mesh.sizes), random))}
        for name, content in self.pack_objects().items():
            packed[_make_rank_key(f"{_STATE}.{name}", mine)] = content
        return {
            key: torch.frombuffer(bytearray(content), dtype=torch.uint8)
            for key, content in packed.items()
        }

    def select_saved(
        self, saved: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    ) -> dict[str, Tensor]:
        """Allocate tensors for this rank's values of a checkpoint with metadata ``saved``, by
        key."""
        wanted = {_RANDOM: _make_rank_key(_RANDOM, self._coordinate)}
        for name in self._state:
            wanted[name] = self._find_nearest_key(f"{_STATE}.{name}", saved)
        # Its import takes longer than that of torch.
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        found = {}
        for key in wanted.values():
            entry = saved.get(key)
            if isinstance(entry, TensorStorageMetadata):
                found[key] = torch.empty(entry.size, dtype=torch.uint8)
        return found

    def _find_nearest_key(self, kind: str, saved: Collection[str]) -> str:
        """Return this rank's key if it is in ``saved``, else that of the nearest rank there."""
        keys = [_make_rank_key(kind, place) for place in self._list_candidates()]
        return next((key for key in keys if key in saved), keys[0])

    def _list_candidates(self) -> Iterator[Coordinate]:
        """Yield this rank and others, nearest first: stages of its column, of a column with the
        same data, and of the first column."""
        mine = self._coordinate
        for names in ((), set(COLUMN_DIMENSIONS) - set(DATA_DIMENSIONS), COLUMN_DIMENSIONS):
            near = mine.mesh.find_coordinate(mine.find_first_along(names))
            for stage in range(mine.stage, -1, -1):
                yield mine.mesh.find_coordinate(near.find_rank_at_stage(stage))

    def unpack_tensors(self, packed: Mapping[str, Tensor]) -> None:
        """Load state into the user's objects. Objects without saved state do not change."""
        mine = self._coordinate
        for name, value in self._state.items():
            key = self._find_nearest_key(f"{_STATE}.{name}", packed)
            if key in packed:
                value.load_state_dict(_deserialize_object(packed[key].numpy().tobytes()))
        key = _make_rank_key(_RANDOM, mine)
        if key not in packed:
            return
        shape, random = _deserialize_object(packed[key].numpy().tobytes())
        if shape != mine.mesh.sizes:
            return
        torch.set_rng_state(random["cpu"])
        if "device" in random and self._device.type == "cuda":
            torch.cuda.set_rng_state(random["device"], self._device)


def _make_rank_key(kind: str, place: Coordinate) -> str:
    return ".".join([kind, *(f"{name}{place.index_along(name)}" for name in DIMENSIONS)])


def _yields_batches(value: Any) -> bool:
    """True for an object that yields batches: a loader, a sampler or an iterator."""
    if isinstance(value, (nn.Module, Mapping)):
        return False
    return hasattr(value, "__iter__") or hasattr(value, "__next__")


def _serialize_object(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _deserialize_object(content: bytes) -> Any:
    # Like torch's checkpoints for values other than tensors: a state may have objects of any type.
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
