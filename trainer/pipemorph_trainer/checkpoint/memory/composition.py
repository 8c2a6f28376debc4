"""Composes the state of a rank whose part of the model has changed, from copies of ranks that held
other parts.

Values are identified by their names in the whole model: parameters, buffers, gradients, the
optimizer's state of a parameter, and the hyperparameters of its group. Everything else, such as
random state and objects of the user, comes from the rank's own copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipemorph_trainer.checkpoint.memory.state_copy import CopyForm, StateCopy, TensorEntry

PARAMETER_NAMES_KEY = "param_names"
"""Key of a group under which torch saves names of parameters; not a hyperparameter."""


class ComposedState(NamedTuple):
    """State in the form of a :class:`~.state_copy.StateCopy` of this rank."""

    form: CopyForm
    tensors: Mapping[str, Tensor]
    pickled_object: bytes


class WantedState(NamedTuple):
    """Contents of a rank's part. ``tensors``: ``parameter.`` or ``buffer.`` and a name;
    ``modules``: names of modules that save more than tensors; ``groups``: parameter names of each
    group of the optimizer."""

    stage: int
    tensors: Sequence[str]
    modules: Sequence[str]
    groups: Sequence[Sequence[str]]

    @property
    def names(self) -> list[str]:
        """Names in the form of :attr:`StageCopy.held_names`."""
        return [*self.tensors, *(f"module.{name}" for name in self.modules)]


@dataclass
class StageCopy:
    """Copy of a rank that held ``stage``."""

    copy: StateCopy
    stage: int
    optimizer: dict[str, list[tuple[str, TensorEntry]]] = field(default_factory=dict)
    """Tensors of the optimizer's state, by the name of their parameter."""
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    """Other tensors, by kind and name."""

    def __post_init__(self) -> None:
        for entry in self.copy.form:
            kind, rest = entry.name.split(".", 1)
            if kind == "optimizer":
                index, key = rest.split(".", 1)
                self.optimizer.setdefault(self._parameter_names[int(index)], []).append(
                    (key, entry)
                )
            elif kind != "loose":
                self.tensors[f"{kind}.{rest.split('.', 1)[1]}"] = entry

    @cached_property
    def other_values(self) -> dict[str, Any]:
        found: dict[str, Any] = pickle.loads(self.copy.pickled_object)
        return found

    @cached_property
    def _parameter_names(self) -> list[str]:
        return [name for group in self.other_values["names"] for name in group]

    @property
    def held_names(self) -> Iterable[str]:
        """Names of its values: those of :attr:`WantedState.tensors`, and ``module.`` names."""
        yield from self.tensors
        for stage, name in self.other_values["modules"]:
            if stage == self.stage:
                yield f"module.{name}"

    @property
    def bytes_by_name(self) -> dict[str, int]:
        """Bytes of the :meth:`select_entries` of each name in :attr:`held_names`."""
        found = dict.fromkeys(self.held_names, 0)
        for key, entry in self.tensors.items():
            kind, name = key.split(".", 1)
            found[f"parameter.{name}" if kind == "gradient" else key] += entry.nbytes
        for name, states in self.optimizer.items():
            found[f"parameter.{name}"] += sum(entry.nbytes for _, entry in states)
        return found

    def select_entries(self, names: Collection[str]) -> Iterator[TensorEntry]:
        """Yield the tensors of names in :attr:`held_names`: for a parameter also its gradient and
        its optimizer state."""
        for key, entry in self.tensors.items():
            kind, name = key.split(".", 1)
            if key in names or (kind == "gradient" and f"parameter.{name}" in names):
                yield entry
        for name, states in self.optimizer.items():
            if f"parameter.{name}" in names:
                yield from (entry for _, entry in states)

    def get_tensor(self, entry: TensorEntry) -> Tensor:
        return self.copy.tensors[entry.name]

    def get_other_state(self, name: str) -> dict[str, Any] | None:
        """Return the optimizer's state of a parameter apart from tensors; None if it has none."""
        other: dict[int, dict[str, Any]] = self.other_values["other"]
        return (
            other.get(self._parameter_names.index(name)) if name in self._parameter_names else None
        )

    def get_hyperparameters(self, name: str) -> dict[str, Any] | None:
        """Return the hyperparameters of a parameter's group; None if it is in no group."""
        for names, group in zip(
            self.other_values["names"], self.other_values["groups"], strict=True
        ):
            if name in names:
                return {key: value for key, value in group.items() if key != PARAMETER_NAMES_KEY}
        return None


def compose_state(
    own: StageCopy, others: Iterable[StageCopy], wanted: WantedState
) -> ComposedState | str:
    """Compose the state of this rank's part from its own copy and from ``others``, which is read
    only as far as values are missing. Returns the reason if that is not possible."""
    found = dict.fromkeys(own.held_names, own)
    lacking = {name for name in wanted.names if name not in found}
    for other in others if lacking else ():
        for name in lacking.intersection(other.held_names):
            found[name] = other
        lacking -= found.keys()
        if not lacking:
            break
    if lacking:
        (kind, name) = min(lacking).split(".", 1)
        return f"no rank has a copy of the {kind} {name}"
    form: list[TensorEntry] = []
    tensors: dict[str, Tensor] = {}

    def add_tensor(name: str, entry: TensorEntry, source: StageCopy) -> None:
        form.append(entry._replace(name=name))
        tensors[name] = source.get_tensor(entry)

    gradients: dict[str, str] = {}
    for key in wanted.tensors:
        source, (kind, name) = found[key], key.split(".", 1)
        add_tensor(f"{kind}.{wanted.stage}.{name}", source.tensors[key], source)
        grad = source.other_values["gradients"].get(f"gradient.{source.stage}.{name}")
        if kind == "parameter" and grad is not None:
            mine = f"gradient.{wanted.stage}.{name}"
            gradients[mine] = grad
            if grad == "value":
                add_tensor(mine, source.tensors[f"gradient.{name}"], source)
    groups: list[dict[str, Any]] = []
    other_state: dict[int, dict[str, Any]] = {}
    index = 0
    for number, group in enumerate(wanted.groups):
        values: dict[str, Any] | None = None
        for name in group:
            source = found[f"parameter.{name}"]
            for state, entry in source.optimizer.get(name, ()):
                add_tensor(f"optimizer.{index}.{state}", entry, source)
            if (more := source.get_other_state(name)) is not None:
                other_state[index] = more
            mine_too = source.get_hyperparameters(name)
            if mine_too is None:
                return f"the optimizer had no parameter {name}"
            if values is not None and not _have_equal_values(values, mine_too):
                return (
                    f"the optimizer's group {number} has parameters of groups that differed, such"
                    f" as {group[0]} and {name}"
                )
            values = mine_too
            index += 1
        if values is None:
            was = own.other_values["groups"]
            values = was[number] if number < len(was) else {}
        groups.append(values)
    rest = own.other_values | {
        "modules": {
            (wanted.stage, name): source.other_values["modules"][source.stage, name]
            for name in wanted.modules
            for source in (found[f"module.{name}"],)
        },
        "gradients": gradients,
        "groups": groups,
        "other": other_state,
        "names": [list(group) for group in wanted.groups],
    }
    return ComposedState(tuple(form), tensors, pickle.dumps(rest))


def _have_equal_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def are_equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return torch.equal(a, b)
        return a is b or bool(a == b)

    return one.keys() == other.keys() and all(are_equal(v, other[k]) for k, v in one.items())
