"""What a rank's state is made of: tensors by name, and the rest as one object.

A value has the same name on every rank that holds the same part of the model, so that the state of
one can be given to another. How that of a rank with another part is composed of several: see
:mod:`.composed`.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph.wire import IterationSample
from pipemorph_trainer.executor.grad_form import grad_dtype, zero_grad
from pipemorph_trainer.executor.split.rerun import random_state, set_random_state
from pipemorph_trainer.executor.stages.emulated import EmulatedRunner
from pipemorph_trainer.state.kept.composed import Composed, Wanted
from pipemorph_trainer.state.kept.copies import Copy, Entry, Form
from pipemorph_trainer.state.weights import comparable
from pipemorph_trainer.topology.placement import is_dtensor, local

if TYPE_CHECKING:
    from pipemorph_trainer.state.extra import Extra

_STEPPED = ("parameter.", "loose.", "optimizer.")
"""What the names of values begin with that an optimizer's step changes."""


LOOSE = "#"
"""What the names of an optimizer's parameters begin with that are of no stage."""


def _of_stage(key: str) -> bool:
    return key.startswith(("parameter.", "buffer."))


def changes_within_iterations(name: str) -> bool:
    """Whether a value changes before the next step of the optimizer: a buffer or a gradient."""
    return not name.startswith(_STEPPED)


class Values:
    """The state of one rank.

    ``modules``: of its stages; ``emulated``: the runners of emulated ones. ``optimizer``: of all of
    them. ``extra``: of the user.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        emulated: Mapping[int, EmulatedRunner],
        optimizer: torch.optim.Optimizer | None,
        extra: Extra,
    ) -> None:
        self._modules, self._emulated = modules, emulated
        self.optimizer, self._extra = optimizer, extra
        tensors = [t for m in modules.values() for t in (*m.parameters(), *m.buffers())]
        self._devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._accumulates = False
        """Whether there were gradients at the beginning of an iteration."""
        self._entries: dict[str, Entry] = {}
        self._random: dict[str, Any] = {}
        self._names: dict[int, str] | None = None
        """Of the parameters of all modules, by their ids."""

    @property
    def shared(self) -> bool:
        """Whether the ranks of other replicas hold the same: not those of emulated stages."""
        return not self._emulated

    def refusal(self, *, on_device: bool) -> str:
        """Why this state cannot be kept; empty if it can. ``on_device``: what is on a device
        can."""
        if not self._modules and not self._emulated:
            return "its stage belongs to another trainer"
        if self._devices and not on_device:
            return (
                "its stage is on a device, where state is kept if spec.recovery.snapshotIterations"
                " says how often"
            )
        trained = any(p.requires_grad for m in self._modules.values() for p in m.parameters())
        if trained and self.optimizer is None:
            return "Pipeline was given no optimizer"
        for name, value in self._held():
            if not comparable(local(value)):
                return f"{name} is no plain tensor (sparse, quantized or a tensor subclass)"
        return ""

    def mark(self) -> None:
        """Take the random state, and the state of what batches are drawn from: the next iteration's
        batch has not been drawn yet."""
        self.mark_random()
        self._extra.mark()

    def mark_random(self) -> None:
        """Take the random state."""
        self._random = random_state(self._devices)

    def take(
        self, unreported: Sequence[IterationSample] = ()
    ) -> tuple[Form, dict[str, Tensor], bytes]:
        """The state before an iteration: its form, its tensors (not copied), and the rest.
        ``unreported``: iterations before it."""
        form: list[Entry] = []
        values: dict[str, Tensor] = {}
        for name, value in self._held():
            self._add(name, value, form, values)
        gradients = self._gradients(form, values)
        rest = {
            "random": self._random,
            "modules": self._extra_states(),
            "emulated": {stage: each.state() for stage, each in self._emulated.items()},
            "gradients": gradients,
            "unreported": unreported,
            "optimizer": type(self.optimizer).__name__,
            "names": self._names_of_groups(),
            "groups": hyperparameters(self.optimizer) if self.optimizer is not None else [],
            "other": self._non_tensors(),
            "objects": self._extra.pack_objects(),
        }
        return tuple(form), values, pickle.dumps(rest)

    def _non_tensors(self) -> dict[int, dict[str, Any]]:
        """What the optimizer's state has beside tensors, by parameter."""
        other: dict[int, dict[str, Any]] = {}
        for index, _, key, value in self._of_optimizer():
            if not isinstance(value, Tensor):
                other.setdefault(index, {})[key] = value
        return other

    def _add(self, name: str, value: Tensor, form: list[Entry], values: dict[str, Tensor]) -> None:
        form.append(self._entry_of(name, value, value.dtype))
        values[name] = local(value)

    def _entry_of(self, name: str, like: Tensor, dtype: torch.dtype) -> Entry:
        entry = self._entries.get(name)
        if entry is None or (entry.shape, entry.torch_dtype) != (local(like).shape, dtype):
            entry = self._entries[name] = _entry(name, like, dtype)
        return entry

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        known = set()
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                known.add(id(parameter))
                yield f"parameter.{stage}.{name}", parameter
            for name, buffer in module.named_buffers():
                yield f"buffer.{stage}.{name}", buffer
        for index, each in enumerate(self._of_groups()):
            if id(each) not in known:
                yield f"loose.{index}", each
        for index, of, key, value in self._of_optimizer():
            if isinstance(value, Tensor):
                if is_dtensor(value) and value.shape != of.shape:
                    raise ValueError(
                        f"the optimizer's {key} is distributed otherwise than its parameter"
                    )
                yield f"optimizer.{index}.{key}", value

    def _of_groups(self) -> list[Tensor]:
        if self.optimizer is None:
            return []
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _names_of_groups(self) -> list[list[str]]:
        """The names, in their modules, of the parameters of each group of the optimizer; those that
        are of no module are called by their number."""
        if self.optimizer is None:
            return []
        if self._names is None:
            self._names = {
                id(parameter): name
                for module in self._modules.values()
                for name, parameter in module.named_parameters()
            }
        count = itertools.count()
        return [
            [
                self._names.get(id(each), f"{LOOSE}{n}")
                for each in group["params"]
                for n in (next(count),)
            ]
            for group in self.optimizer.param_groups
        ]

    def _not_saved(self) -> set[str]:
        """The buffers that modules do not save. Their names need not be those of one stage alone,
        and whoever builds a part makes them."""
        return {
            f"buffer.{stage}.{prefix}{'.' if prefix else ''}{name}"
            for stage, whole in self._modules.items()
            for prefix, module in whole.named_modules()
            for name in module._non_persistent_buffers_set
        }

    def wanted(self) -> Wanted:
        """What the part of this rank, of one stage, is made of, but for buffers that modules do not
        save."""
        (stage,) = self._modules or self._emulated
        own = self._not_saved()
        tensors = [
            ".".join((kind, name))
            for key, _ in self._held()
            if _of_stage(key) and key not in own
            for kind, _, name in (key.split(".", 2),)
        ]
        modules = [name for _, name in self._extra_states()]
        return Wanted(stage, tensors, modules, self._names_of_groups())

    def why_fixed(self) -> str:
        """Why this state is of no use to ranks with other parts; empty if it is."""
        if any(n.startswith(LOOSE) for group in self._names_of_groups() for n in group):
            return "the optimizer has parameters that are not of the stage"
        names = {name for each in self._modules.values() for name, _ in each.named_parameters()}
        return self._extra.why_fixed(self.optimizer, names)

    def _of_optimizer(self) -> Iterator[tuple[int, Tensor, str, Any]]:
        """The optimizer's state: number of the parameter, the parameter, key and value."""
        for index, parameter in enumerate(self._of_groups()):
            assert self.optimizer is not None
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield index, parameter, key, value

    def _gradients(self, form: list[Entry], values: dict[str, Tensor]) -> dict[str, str]:
        """Add gradients under accumulation. Returns which parameters have one: ``zero`` or
        ``value``."""
        found: dict[str, str] = {}
        parameters: list[tuple[str, Tensor]] = [
            (f"gradient.{stage}.{name}", parameter)
            for stage, module in self._modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        for name, parameter in parameters:
            if parameter.grad is not None:
                # A device is not asked, since that would wait for all its work.
                some = parameter.grad.is_cuda or bool(local(parameter.grad).count_nonzero())
                found[name] = "value" if some else "zero"
        self._accumulates = self._accumulates or "value" in found.values()
        if not self._accumulates:
            return found
        # With room for all from now on, so that the form stays.
        for name, parameter in parameters:
            form.append(self._entry_of(name, parameter, grad_dtype(parameter)))
            if found.get(name) == "value":
                values[name] = local(parameter.grad)  # type: ignore[arg-type]
        return found

    def _extra_states(self) -> dict[tuple[int, str], Any]:
        """What modules save beside their tensors."""
        return {
            (stage, name): module.get_extra_state()
            for stage, whole in self._modules.items()
            for name, module in whole.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def misfit(self, form: Form, content: bytes) -> str:
        """Why a copy does not fit this rank; empty if it does."""
        mine = {n: _entry(n, v) for n, v in self._held() if not n.startswith("optimizer.")}
        other = {e.name: e for e in form if not e.name.startswith(("optimizer.", "gradient."))}
        mine = {n: entry for n, entry in mine.items() if n in other or n not in self._not_saved()}
        if set(mine) != set(other):
            (name, *_) = sorted(set(mine) ^ set(other))
            return f"{name} is only in {'the model' if name in mine else 'the kept state'}"
        for name, entry in mine.items():
            kept = other[name]
            if (entry.dtype, entry.shape) != (kept.dtype, kept.shape):
                return (
                    f"{name} is {entry.dtype}{list(entry.shape)}, and was"
                    f" {kept.dtype}{list(kept.shape)}"
                )
        rest = pickle.loads(content)
        kind, groups = type(self.optimizer).__name__, rest["groups"]
        if rest["optimizer"] != kind:
            return f"the optimizer is {kind}, and was {rest['optimizer']}"
        now = len(self.optimizer.param_groups) if self.optimizer is not None else 0
        if len(groups) != now:
            return f"the optimizer has {now} groups of parameters, and had {len(groups)}"
        return ""

    @torch.no_grad()
    def apply(self, copy: Copy | Composed, *, own: bool) -> Sequence[IterationSample]:
        """Give the state of a copy, that fits, to the rank. ``own``: it is this rank's; another's
        random state is not taken. Returns iterations that may not have been reported."""
        rest = pickle.loads(copy.object)
        for name, value in list(self._held()):
            # A composed state has no buffers that modules do not save.
            if not name.startswith("optimizer.") and name in copy.tensors:
                local(value).copy_(copy.tensors[name])
        for (stage, name), found in rest["modules"].items():
            self._modules[stage].get_submodule(name).set_extra_state(found)
        for stage, runner in self._emulated.items():
            runner.restore(rest["emulated"][stage])
        self._apply_optimizer(copy, rest)
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                key = f"gradient.{stage}.{name}"
                kind = rest["gradients"].get(key)
                parameter.grad = None if kind is None else zero_grad(parameter)
                if kind == "value":
                    local(parameter.grad).copy_(copy.tensors[key])  # type: ignore[arg-type]
        self._extra.unpack_objects(rest["objects"])
        if isinstance(copy, Composed):
            self._extra.follow_groups()
        if own:
            set_random_state(rest["random"])
        unreported: Sequence[IterationSample] = rest["unreported"]
        return unreported

    def _apply_optimizer(self, copy: Copy | Composed, rest: Mapping[str, Any]) -> None:
        optimizer = self.optimizer
        if optimizer is None:
            return
        parameters = self._of_groups()
        optimizer.state.clear()
        for entry in copy.form:
            if entry.name.startswith("optimizer."):
                number, key = entry.name.removeprefix("optimizer.").split(".", 1)
                parameter = parameters[int(number)]
                optimizer.state[parameter][key] = _made(entry, copy.tensors[entry.name], parameter)
        for index, values in rest["other"].items():
            optimizer.state[parameters[index]].update(values)
        assign_hyperparameters(optimizer, rest["groups"])


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group of an optimizer has beside its parameters."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def assign_hyperparameters(
    optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Any]]
) -> None:
    """Set what each group of an optimizer has beside its parameters. Tensors are copied into those
    of the group."""
    for group, mine in zip(optimizer.param_groups, values, strict=True):
        for name, value in mine.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _entry(name: str, value: Tensor, dtype: torch.dtype | None = None) -> Entry:
    part = local(value)
    told = str(part.dtype if dtype is None else dtype).removeprefix("torch.")
    on_device = part.device.type != "cpu"
    return Entry(name, told, tuple(part.shape), is_dtensor(value), on_device)


def _made(entry: Entry, value: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of an optimizer's state, like ``parameter`` if it was one of its shape."""
    on_device = parameter.device.type != "cpu"
    if entry.shape == tuple(local(parameter).shape) and entry.on_device == on_device:
        like = parameter if entry.parted else local(parameter)
        made = torch.zeros_like(like, dtype=entry.torch_dtype)
        local(made).copy_(value)
        return made
    return value.to(parameter.device if entry.on_device else "cpu", copy=True)
