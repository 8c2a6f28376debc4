"""Composes the state of a rank whose part of the model has changed, from copies of ranks that held
other parts.

What a copy holds goes by its name in the whole model: parameters, buffers, gradients, the
optimizer's state of a parameter, and the hyperparameters of its group. Everything else, as random
state and what the user added, is the rank's own.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipemorph_trainer.state.kept.copies import Copy, Entry, Form

OWN_OF_GROUP = "param_names"
"""The hyperparameter of a group that is no value: what torch calls its parameters."""


class Composed(NamedTuple):
    """What a :class:`~.copies.Copy` of this rank would hold."""

    form: Form
    tensors: Mapping[str, Tensor]
    object: bytes


class Wanted(NamedTuple):
    """What the part of a rank is made of. ``tensors``: ``parameter.`` or ``buffer.`` and a name;
    ``modules``: names of those that save more than tensors; ``groups``: of the optimizer, by the
    names of their parameters."""

    stage: int
    tensors: Sequence[str]
    modules: Sequence[str]
    groups: Sequence[Sequence[str]]

    @property
    def names(self) -> list[str]:
        """As :attr:`Source.held`."""
        return [*self.tensors, *(f"module.{name}" for name in self.modules)]


@dataclass
class Source:
    """A copy of the rank that had ``stage``."""

    copy: Copy
    stage: int
    optimizer: dict[str, list[tuple[str, Entry]]] = field(default_factory=dict)
    """Tensors of the optimizer's state, by the name of their parameter."""
    tensors: dict[str, Entry] = field(default_factory=dict)
    """Other tensors, by kind and name."""

    def __post_init__(self) -> None:
        for entry in self.copy.form:
            kind, rest = entry.name.split(".", 1)
            if kind == "optimizer":
                index, key = rest.split(".", 1)
                self.optimizer.setdefault(self._names[int(index)], []).append((key, entry))
            elif kind != "loose":
                self.tensors[f"{kind}.{rest.split('.', 1)[1]}"] = entry

    @cached_property
    def rest(self) -> dict[str, Any]:
        found: dict[str, Any] = pickle.loads(self.copy.object)
        return found

    @cached_property
    def _names(self) -> list[str]:
        return [name for group in self.rest["names"] for name in group]

    @property
    def held(self) -> Iterable[str]:
        """What it has, as in :attr:`Wanted.tensors`, and the ``module.`` names."""
        yield from self.tensors
        for stage, name in self.rest["modules"]:
            if stage == self.stage:
                yield f"module.{name}"

    @property
    def sizes(self) -> dict[str, int]:
        """What it has, as in :attr:`held`, with the bytes of :meth:`entries` of each."""
        found = dict.fromkeys(self.held, 0)
        for key, entry in self.tensors.items():
            kind, name = key.split(".", 1)
            found[f"parameter.{name}" if kind == "gradient" else key] += entry.nbytes
        for name, states in self.optimizer.items():
            found[f"parameter.{name}"] += sum(entry.nbytes for _, entry in states)
        return found

    def entries(self, names: Collection[str]) -> Iterator[Entry]:
        """Tensors of these names, which are as in :attr:`held`, with the gradients and the
        optimizer's state of parameters."""
        for key, entry in self.tensors.items():
            kind, name = key.split(".", 1)
            if key in names or (kind == "gradient" and f"parameter.{name}" in names):
                yield entry
        for name, states in self.optimizer.items():
            if f"parameter.{name}" in names:
                yield from (entry for _, entry in states)

    def tensor(self, entry: Entry) -> Tensor:
        return self.copy.tensors[entry.name]

    def other(self, name: str) -> dict[str, Any] | None:
        """The optimizer's state of a parameter that is no tensor."""
        other: dict[int, dict[str, Any]] = self.rest["other"]
        return other.get(self._names.index(name)) if name in self._names else None

    def hyperparameters(self, name: str) -> dict[str, Any] | None:
        """Of the group of a parameter."""
        for names, group in zip(self.rest["names"], self.rest["groups"], strict=True):
            if name in names:
                return {key: value for key, value in group.items() if key != OWN_OF_GROUP}
        return None


def compose(own: Source, others: Iterable[Source], wanted: Wanted) -> Composed | str:
    """The state of this rank's part, from its own copy and, of what that lacks, from ``others``, of
    which no more are asked for than it takes. Or why it cannot be composed."""
    found = dict.fromkeys(own.held, own)
    lacking = {name for name in wanted.names if name not in found}
    for other in others if lacking else ():
        for name in lacking.intersection(other.held):
            found[name] = other
        lacking -= found.keys()
        if not lacking:
            break
    if lacking:
        (kind, name) = min(lacking).split(".", 1)
        return f"no rank has kept the {kind} {name}"
    form: list[Entry] = []
    tensors: dict[str, Tensor] = {}

    def add(name: str, entry: Entry, source: Source) -> None:
        form.append(entry._replace(name=name))
        tensors[name] = source.tensor(entry)

    gradients: dict[str, str] = {}
    for key in wanted.tensors:
        source, (kind, name) = found[key], key.split(".", 1)
        add(f"{kind}.{wanted.stage}.{name}", source.tensors[key], source)
        grad = source.rest["gradients"].get(f"gradient.{source.stage}.{name}")
        if kind == "parameter" and grad is not None:
            mine = f"gradient.{wanted.stage}.{name}"
            gradients[mine] = grad
            if grad == "value":
                add(mine, source.tensors[f"gradient.{name}"], source)
    groups: list[dict[str, Any]] = []
    other_state: dict[int, dict[str, Any]] = {}
    index = 0
    for number, group in enumerate(wanted.groups):
        values: dict[str, Any] | None = None
        for name in group:
            source = found[f"parameter.{name}"]
            for state, entry in source.optimizer.get(name, ()):
                add(f"optimizer.{index}.{state}", entry, source)
            if (more := source.other(name)) is not None:
                other_state[index] = more
            mine_too = source.hyperparameters(name)
            if mine_too is None:
                return f"the optimizer had no parameter {name}"
            if values is not None and not _same(values, mine_too):
                return (
                    f"the optimizer's group {number} has parameters of groups that differed, as"
                    f" {group[0]} and {name}"
                )
            values = mine_too
            index += 1
        if values is None:
            was = own.rest["groups"]
            values = was[number] if number < len(was) else {}
        groups.append(values)
    rest = own.rest | {
        "modules": {
            (wanted.stage, name): source.rest["modules"][source.stage, name]
            for name in wanted.modules
            for source in (found[f"module.{name}"],)
        },
        "gradients": gradients,
        "groups": groups,
        "other": other_state,
        "names": [list(group) for group in wanted.groups],
    }
    return Composed(tuple(form), tensors, pickle.dumps(rest))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return torch.equal(a, b)
        return a is b or bool(a == b)

    return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
