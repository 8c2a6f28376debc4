"""Check that a user's objects (``state=``) still fit a rank that gets another part of the model.

The objects stay with the rank and are loaded unchanged. So state of single parameters, or of the
optimizer's groups by position, would be loaded into the parameters and groups of another part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

GROUP_LISTS = frozenset({"base_lrs", "_last_lr"})
"""Lists of a scheduler, by the optimizer's groups, whose values are in those groups as well."""


def find_move_obstacle(
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    parameters: Collection[str],
    sources: Collection[str],
) -> str:
    """Explain why a rank with these objects cannot get another part; empty if it can.
    ``parameters``: names of the stage's parameters. ``sources``: names of objects that yield
    batches, which may have tensors."""
    for name, value in state.items():
        if isinstance(value, torch.optim.Optimizer | nn.Module):
            kind = "an optimizer" if isinstance(value, torch.optim.Optimizer) else "a module"
            return f"state has {name!r}, {kind}, whose values would be those of another part"
        if isinstance(value, LRScheduler):
            if value.optimizer is not optimizer:
                return f"state has {name!r}, which schedules another optimizer than Pipeline's"
            if why := _find_positional_state(value):
                return f"state has {name!r}, a {type(value).__name__}, with {why}"
        elif name not in sources and (
            what := _find_parameter_state(value.state_dict(), parameters)
        ):
            return f"state has {name!r}, with {what}, which would be of another part"
    return ""


def _find_positional_state(scheduler: LRScheduler) -> str:
    """Describe scheduler state that goes by the positions of the optimizer's groups and is not in
    those groups; empty if there is none."""
    count = len(scheduler.optimizer.param_groups)
    for each in _flatten_scheduler(scheduler):
        base = getattr(each, "base_lrs", None)
        begun = [group.get("initial_lr") for group in each.optimizer.param_groups]
        if base is not None and list(base) != begun:
            return "base_lrs that are not the initial_lr of the optimizer's groups"
        if count < 2:
            continue
        for key, value in vars(each).items():
            if key in GROUP_LISTS or key in {"_schedulers", "_milestones", "lr_lambdas"}:
                continue
            if isinstance(value, list | tuple) and len(value) == count:
                return f"{key}, a value for each group of the optimizer by its position"
        lambdas = getattr(each, "lr_lambdas", [])
        if any(one is not lambdas[0] for one in lambdas):
            return "a function for each group of the optimizer by its position"
    return ""


def _flatten_scheduler(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler and the schedulers that it consists of."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from _flatten_scheduler(each)


def _find_parameter_state(value: Any, parameters: Collection[str]) -> str:
    """Describe recognizable state of single parameters; empty if there is none."""
    if isinstance(value, Tensor):
        return "a tensor" if value.numel() > 1 else ""
    if isinstance(value, Mapping):
        found = next((key for key in value if isinstance(key, str) and key in parameters), None)
        if found is not None:
            return f"a value of {found}"
        value = value.values()
    elif not isinstance(value, list | tuple):
        return ""
    return next(filter(None, (_find_parameter_state(each, parameters) for each in value)), "")


def adopt_learning_rates(state: Mapping[str, Any]) -> None:
    """Set schedulers to the learning rates of their optimizer's groups, which belong to the new
    part."""
    for value in state.values():
        for each in _flatten_scheduler(value) if isinstance(value, LRScheduler) else ():
            groups = each.optimizer.param_groups
            if hasattr(each, "base_lrs"):
                each.base_lrs = [group["initial_lr"] for group in groups]
            if hasattr(each, "_last_lr"):
                each._last_lr = [group["lr"] for group in groups]
