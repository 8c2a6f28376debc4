"""State of a rank: tensors by name, and all other values as one object.

A value has the same name on every rank that holds the same part of the model, so such ranks can
load each other's state. The state of a rank whose part has changed is composed from several copies,
see :mod:`.composition`.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipemorph.protocol import IterationSample
from pipemorph_trainer.backward.forward_replay import read_random_state, set_random_state
from pipemorph_trainer.backward.gradient_form import grad_dtype, make_zero_grad
from pipemorph_trainer.checkpoint.memory.composition import ComposedState, WantedState
from pipemorph_trainer.checkpoint.memory.state_copy import CopyForm, StateCopy, TensorEntry
from pipemorph_trainer.executor.emulated_stage import EmulatedRunner
from pipemorph_trainer.sync.fingerprints import is_comparable
from pipemorph_trainer.topology.placement import is_dtensor, to_local

if TYPE_CHECKING:
    from pipemorph_trainer.checkpoint.user_state import UserState

_STEPPED = ("parameter.", "loose.", "optimizer.")
"""Prefixes of the names of values that an optimizer's step changes."""
LOOSE = "#"
"""Prefix of the names of an optimizer's parameters that belong to no stage."""


def _belongs_to_stage(key: str) -> bool:
    return key.startswith(("parameter.", "buffer."))


def changes_within_iterations(name: str) -> bool:
    """True if a value changes before the next step of the optimizer: a buffer or a gradient."""
    return not name.startswith(_STEPPED)


class RankState:
    """State of a rank, which can be copied and loaded.

    ``modules``: of its stages; ``emulated``: runners of its emulated stages. ``optimizer``: of all
    stages. ``extra``: objects of the user.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        emulated: Mapping[int, EmulatedRunner],
        optimizer: torch.optim.Optimizer | None,
        extra: UserState,
    ) -> None:
        self._modules, self._emulated = modules, emulated
        self.optimizer, self._extra = optimizer, extra
        tensors = [t for m in modules.values() for t in (*m.parameters(), *m.buffers())]
        self._devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._accumulates = False
        """True if there have been gradients at the beginning of an iteration."""
        self._entries: dict[str, TensorEntry] = {}
        self._random: dict[str, Any] = {}
        self._names: dict[int, str] | None = None
        """Names of the parameters of all modules, by their ids."""

    @property
    def shared_by_replicas(self) -> bool:
        """True if ranks of other replicas hold the same state; False for emulated stages."""
        return not self._emulated

    def find_copy_obstacle(self, *, on_device: bool) -> str:
        """Explain why this state cannot be copied; empty if it can. ``on_device``: tensors on a
        device can be."""
        if not self._modules and not self._emulated:
            return "its stage belongs to another trainer"
        if self._devices and not on_device:
            return (
                "its stage is on a device, whose state is copied only if"
                " spec.recovery.snapshotIterations is set"
            )
        trained = any(p.requires_grad for m in self._modules.values() for p in m.parameters())
        if trained and self.optimizer is None:
            return "Pipeline was given no optimizer"
        for name, value in self._iterate_tensors():
            if not is_comparable(to_local(value)):
                return f"{name} is no plain tensor (sparse, quantized or a tensor subclass)"
        return ""

    def capture_batch_state(self) -> None:
        """Capture the random state and the state of objects that yield batches, before the batch of
        the next iteration is drawn."""
        self.capture_random_state()
        self._extra.capture_batch_state()

    def capture_random_state(self) -> None:
        """Capture the random state."""
        self._random = read_random_state(self._devices)

    def collect_state(
        self, unreported: Sequence[IterationSample] = ()
    ) -> tuple[CopyForm, dict[str, Tensor], bytes]:
        """Collect the state before an iteration: its form, its tensors (not copied), and the
        pickled object. ``unreported``: earlier iterations that the host may not have."""
        form: list[TensorEntry] = []
        values: dict[str, Tensor] = {}
        for name, value in self._iterate_tensors():
            self._add_tensor(name, value, form, values)
        gradients = self._add_gradients(form, values)
        rest = {
            "random": self._random,
            "modules": self._collect_extra_states(),
            "emulated": {stage: each.read_state() for stage, each in self._emulated.items()},
            "gradients": gradients,
            "unreported": unreported,
            "optimizer": type(self.optimizer).__name__,
            "names": self._list_group_names(),
            "groups": copy_hyperparameters(self.optimizer) if self.optimizer is not None else [],
            "other": self._collect_non_tensors(),
            "objects": self._extra.pack_objects(),
        }
        return tuple(form), values, pickle.dumps(rest)

    def _collect_non_tensors(self) -> dict[int, dict[str, Any]]:
        """Collect the optimizer's state apart from tensors, by number of the parameter."""
        other: dict[int, dict[str, Any]] = {}
        for index, _, key, value in self._iterate_optimizer_state():
            if not isinstance(value, Tensor):
                other.setdefault(index, {})[key] = value
        return other

    def _add_tensor(
        self, name: str, value: Tensor, form: list[TensorEntry], values: dict[str, Tensor]
    ) -> None:
        form.append(self._get_entry(name, value, value.dtype))
        values[name] = to_local(value)

    def _get_entry(self, name: str, like: Tensor, dtype: torch.dtype) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None or (entry.shape, entry.torch_dtype) != (to_local(like).shape, dtype):
            entry = self._entries[name] = _make_entry(name, like, dtype)
        return entry

    def _iterate_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of all values, without gradients."""
        known = set()
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                known.add(id(parameter))
                yield f"parameter.{stage}.{name}", parameter
            for name, buffer in module.named_buffers():
                yield f"buffer.{stage}.{name}", buffer
        for index, each in enumerate(self._list_optimizer_parameters()):
            if id(each) not in known:
                yield f"loose.{index}", each
        for index, of, key, value in self._iterate_optimizer_state():
            if isinstance(value, Tensor):
                if is_dtensor(value) and value.shape != of.shape:
                    raise ValueError(
                        f"the optimizer's {key} is distributed otherwise than its parameter"
                    )
                yield f"optimizer.{index}.{key}", value

    def _list_optimizer_parameters(self) -> list[Tensor]:
        if self.optimizer is None:
            return []
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _list_group_names(self) -> list[list[str]]:
        """List the names of the parameters of each group of the optimizer. Parameters that belong
        to no module are named by their number."""
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

    def _list_unsaved_buffers(self) -> set[str]:
        """List the buffers that modules do not save. Their names may occur in several stages, and
        the builder of a stage creates them."""
        return {
            f"buffer.{stage}.{prefix}{'.' if prefix else ''}{name}"
            for stage, whole in self._modules.items()
            for prefix, module in whole.named_modules()
            for name in module._non_persistent_buffers_set
        }

    def list_wanted(self) -> WantedState:
        """List the contents of this rank's part, a single stage, without buffers that modules do
        not save."""
        (stage,) = self._modules or self._emulated
        own = self._list_unsaved_buffers()
        tensors = [
            ".".join((kind, name))
            for key, _ in self._iterate_tensors()
            if _belongs_to_stage(key) and key not in own
            for kind, _, name in (key.split(".", 2),)
        ]
        modules = [name for _, name in self._collect_extra_states()]
        return WantedState(stage, tensors, modules, self._list_group_names())

    def find_move_obstacle(self) -> str:
        """Explain why ranks with other parts cannot use this state; empty if they can."""
        if any(n.startswith(LOOSE) for group in self._list_group_names() for n in group):
            return "the optimizer has parameters that are not of the stage"
        names = {name for each in self._modules.values() for name, _ in each.named_parameters()}
        return self._extra.find_move_obstacle(self.optimizer, names)

    def _iterate_optimizer_state(self) -> Iterator[tuple[int, Tensor, str, Any]]:
        """Yield the optimizer's state: number of the parameter, the parameter, key and value."""
        for index, parameter in enumerate(self._list_optimizer_parameters()):
            assert self.optimizer is not None
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield index, parameter, key, value

    def _add_gradients(self, form: list[TensorEntry], values: dict[str, Tensor]) -> dict[str, str]:
        """Add accumulated gradients to ``form`` and ``values``. Returns the kind of each gradient
        by its name: ``zero`` or ``value``."""
        found: dict[str, str] = {}
        parameters: list[tuple[str, Tensor]] = [
            (f"gradient.{stage}.{name}", parameter)
            for stage, module in self._modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        for name, parameter in parameters:
            if parameter.grad is not None:
                # Not counted on a device, since that would wait for all its work.
                some = parameter.grad.is_cuda or bool(to_local(parameter.grad).count_nonzero())
                found[name] = "value" if some else "zero"
        self._accumulates = self._accumulates or "value" in found.values()
        if not self._accumulates:
            return found
        # The form has room for all gradients from now on, so that it does not change again.
        for name, parameter in parameters:
            form.append(self._get_entry(name, parameter, grad_dtype(parameter)))
            if found.get(name) == "value":
                values[name] = to_local(parameter.grad)  # type: ignore[arg-type]
        return found

    def _collect_extra_states(self) -> dict[tuple[int, str], Any]:
        """Collect the extra state of modules (``get_extra_state``), by stage and name."""
        return {
            (stage, name): module.get_extra_state()
            for stage, whole in self._modules.items()
            for name, module in whole.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def find_misfit(self, form: CopyForm, content: bytes) -> str:
        """Explain why a copy does not fit this rank; empty if it fits."""
        mine = {
            n: _make_entry(n, v)
            for n, v in self._iterate_tensors()
            if not n.startswith("optimizer.")
        }
        other = {e.name: e for e in form if not e.name.startswith(("optimizer.", "gradient."))}
        mine = {
            n: entry
            for n, entry in mine.items()
            if n in other or n not in self._list_unsaved_buffers()
        }
        if set(mine) != set(other):
            (name, *_) = sorted(set(mine) ^ set(other))
            return f"{name} is only in {'the model' if name in mine else 'the copied state'}"
        for name, entry in mine.items():
            copied = other[name]
            if (entry.dtype, entry.shape) != (copied.dtype, copied.shape):
                return (
                    f"{name} is {entry.dtype}{list(entry.shape)}, and was"
                    f" {copied.dtype}{list(copied.shape)}"
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
    def apply_state(
        self, copy: StateCopy | ComposedState, *, own: bool
    ) -> Sequence[IterationSample]:
        """Load a copy that fits into the rank. ``own``: the copy is of this rank; otherwise its
        random state is ignored. Returns iterations that may not have been reported."""
        rest = pickle.loads(copy.pickled_object)
        for name, value in list(self._iterate_tensors()):
            # A composed state has no buffers that modules do not save.
            if not name.startswith("optimizer.") and name in copy.tensors:
                to_local(value).copy_(copy.tensors[name])
        for (stage, name), found in rest["modules"].items():
            self._modules[stage].get_submodule(name).set_extra_state(found)
        for stage, runner in self._emulated.items():
            runner.restore_state(rest["emulated"][stage])
        self._apply_optimizer_state(copy, rest)
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                key = f"gradient.{stage}.{name}"
                kind = rest["gradients"].get(key)
                parameter.grad = None if kind is None else make_zero_grad(parameter)
                if kind == "value":
                    to_local(parameter.grad).copy_(copy.tensors[key])  # type: ignore[arg-type]
        self._extra.unpack_objects(rest["objects"])
        if isinstance(copy, ComposedState):
            self._extra.adopt_learning_rates()
        if own:
            set_random_state(rest["random"])
        unreported: Sequence[IterationSample] = rest["unreported"]
        return unreported

    def _apply_optimizer_state(
        self, copy: StateCopy | ComposedState, rest: Mapping[str, Any]
    ) -> None:
        optimizer = self.optimizer
        if optimizer is None:
            return
        parameters = self._list_optimizer_parameters()
        optimizer.state.clear()
        for entry in copy.form:
            if entry.name.startswith("optimizer."):
                number, key = entry.name.removeprefix("optimizer.").split(".", 1)
                parameter = parameters[int(number)]
                optimizer.state[parameter][key] = _make_optimizer_tensor(
                    entry, copy.tensors[entry.name], parameter
                )
        for index, values in rest["other"].items():
            optimizer.state[parameters[index]].update(values)
        assign_hyperparameters(optimizer, rest["groups"])


def copy_hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copy the hyperparameters of each group of an optimizer: all values but its parameters."""
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
    """Set the hyperparameters of each group of an optimizer. Tensors are copied into those of the
    group."""
    for group, mine in zip(optimizer.param_groups, values, strict=True):
        for name, value in mine.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _make_entry(name: str, value: Tensor, dtype: torch.dtype | None = None) -> TensorEntry:
    part = to_local(value)
    dtype_name = str(part.dtype if dtype is None else dtype).removeprefix("torch.")
    on_device = part.device.type != "cpu"
    return TensorEntry(name, dtype_name, tuple(part.shape), is_dtensor(value), on_device)


def _make_optimizer_tensor(entry: TensorEntry, value: Tensor, parameter: Tensor) -> Tensor:
    """Make a tensor of an optimizer's state: distributed and placed like ``parameter`` if it was
    saved with that shape and kind of device."""
    on_device = parameter.device.type != "cpu"
    if entry.shape == tuple(to_local(parameter).shape) and entry.on_device == on_device:
        like = parameter if entry.is_shard else to_local(parameter)
        made = torch.zeros_like(like, dtype=entry.torch_dtype)
        to_local(made).copy_(value)
        return made
    return value.to(parameter.device if entry.on_device else "cpu", copy=True)
