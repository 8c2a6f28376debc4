"""Finds the parameters of a stage that W can compute, and patches their layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipemorph_trainer.executor.split.compiled.backends import whole_why
from pipemorph_trainer.executor.split.deferred import (
    CompiledLayer,
    Layer,
    LinearCall,
    Sink,
    deferred_linear,
)
from pipemorph_trainer.executor.split.registered import (
    RegisteredForward,
    own_forward,
    weight_gradient_of,
)
from pipemorph_trainer.executor.torch_private import compiled, tensor_hooked
from pipemorph_trainer.topology.placement import is_dtensor


def opaque_modules(stage: nn.Module) -> dict[str, str]:
    """Submodules that cannot be patched or cut inside, by name, each with the reason."""
    gradient_hookers = _gradient_hookers()
    found = {}
    for name, module in stage.named_modules():
        if compiled(module):
            why = whole_why(module)
            found[name] = f"{_called(name)} is compiled{why and ', ' + why}"
        elif isinstance(module, gradient_hookers):
            kind = next(base.__name__ for base in type(module).__mro__ if base in gradient_hookers)
            found[name] = f"{_called(name)} is a {kind}, which acts on gradients in its own hooks"
        elif isinstance(module, torch.jit.ScriptModule):
            found[name] = f"{_called(name)} is a ScriptModule"
    return found


def _gradient_hookers() -> tuple[type, ...]:
    """Wrappers that reduce or shard gradients during the backward. Only of modules that are
    imported already, since there are no instances otherwise."""
    known = {
        "torch.nn.parallel": ("DistributedDataParallel",),
        "torch.distributed.fsdp": ("FullyShardedDataParallel",),
    }
    return tuple(
        getattr(sys.modules[module], name)
        for module, names in known.items()
        for name in names
        if hasattr(sys.modules.get(module), name)
    )


def _called(name: str) -> str:
    return repr(name) if name else "the stage"


def find_layers(stage: nn.Module, *, wrapped: bool = False) -> tuple[list[Layer], dict[str, str]]:
    """The Linears that can be deferred, the compiled modules that leave gradients to W themselves,
    and every other trainable parameter with its reason.

    A Linear counts only if it is certain to run ``nn.Linear.forward`` on its own parameter, a plain
    one or a DTensor; a registered module, only if it is certain to run its class's forward.

    ``wrapped``: a Linear's forward may have been replaced, as in stages that another trainer has
    prepared. Then each call of ``F.linear`` with the layer's own weight is deferred.
    """
    owners: dict[int, list[str]] = {}
    for prefix, module in stage.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
    modules = dict(stage.named_modules())
    splitting = [
        name for name, module in modules.items() if compiled(module) and not whole_why(module)
    ]
    opaque = {name: why for name, why in opaque_modules(stage).items() if name not in splitting}
    layers: list[Layer] = []
    refused: dict[str, str] = {}
    inside: dict[str, dict[str, bool]] = {}
    """By the name of a compiled module: each parameter that may wait, and whether it would if the
    module were not compiled."""
    for prefix, module in modules.items():
        own = {
            owners[id(parameter)][0]: parameter
            for _, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        if not own:
            continue
        within = next((name for name in splitting if _inside(prefix, name)), None)
        reason = next((why for name, why in opaque.items() if _inside(prefix, name)), "")
        why_not = _why_not(module, wrapped)
        if within is None:
            reason = reason or why_not
        for parameter in own.values():
            names = owners[id(parameter)]
            shared = len(names) > 1 and (
                within is None or not all(_inside(each, within) for each in names)
            )
            if not reason and shared:
                reason = f"tied: the same parameter is {' and '.join(names)}"
            if not reason and tensor_hooked(parameter):
                reason = f"{names[0]} has gradient hooks"
        if reason:
            refused.update(dict.fromkeys(own, reason))
        elif within is None:
            layers.append(Layer(prefix, module))
        else:
            inside.setdefault(within, {}).update(dict.fromkeys(own, not why_not))
    for name, found in inside.items():
        cut = len(name) + 1 if name else 0
        layers.append(
            CompiledLayer(
                name,
                modules[name],
                [each[cut:] for each in found],
                [each[cut:] for each, expected in found.items() if expected],
            )
        )
    return layers, refused


def _inside(name: str, parent: str) -> bool:
    return not parent or name == parent or name.startswith(parent + ".")


def _why_not(module: nn.Module, wrapped: bool) -> str:
    """Why a module's own parameters cannot be deferred; empty if they can."""
    kind = type(module).__name__
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return "the weight is parametrized"
    if weight_gradient_of(module) is not None:
        return _registered_why_not(module)
    if not isinstance(module, nn.Linear):
        return f"in a {kind}, which is not an nn.Linear"
    if type(module).forward is not nn.Linear.forward:
        return f"in a {kind}, whose forward is not nn.Linear's"
    if isinstance(module.__dict__.get("forward"), (_Forward, _Wrapped)):
        return "the split of another stage defers it"
    if "forward" in module.__dict__ and not wrapped:
        return f"the forward of this {kind} was replaced"
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return f"the {name} is parametrized"
        parameter = module._parameters[name]
        if parameter is None:
            continue
        plain = type(parameter) is nn.Parameter or is_dtensor(parameter)
        if not plain or parameter.layout is not torch.strided:
            return f"the {name} is a {type(parameter).__name__}, not a plain parameter"
        if not parameter.is_floating_point():
            return f"the {name} is {parameter.dtype}"
    return ""


def _registered_why_not(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module.__dict__.get("forward"), (RegisteredForward, _Wrapped)):
        return "the split of another stage defers it"
    if "forward" in module.__dict__:
        return f"the forward of this {kind} was replaced"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return f"the {name} is a {type(parameter).__name__}, not a plain parameter"
    return ""


class Patch:
    """Replaces the forward of the layers while the stage runs, and restores it.

    ``forward`` is set in the instance's ``__dict__`` on entry and deleted on exit. So hooks, names,
    ``state_dict``, copies and calls from outside see plain Linears.
    """

    def __init__(self, layers: list[Layer], sink: Sink) -> None:
        self._patched = [
            (layer.module.__dict__, _forward_of(layer, sink))
            for layer in layers
            if not isinstance(layer, CompiledLayer)
        ]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        for attributes, forward in self._patched:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in self._patched:
                attributes.pop("forward", None)

    def install(self) -> None:
        """Replace the forward for good. Copies of a layer have what was there before."""
        for attributes, forward in self._patched:
            replaced = attributes.get("forward")
            attributes["forward"] = (
                _Wrapped(replaced, forward)
                if replaced and isinstance(forward, _Forward)
                else forward
            )


def _forward_of(layer: Layer, sink: Sink) -> _Forward | RegisteredForward:
    registered = weight_gradient_of(layer.module)
    return RegisteredForward(layer, sink, registered) if registered else _Forward(layer, sink)


class _Forward:
    """The forward of a Linear whose backward leaves the weight's gradient to W."""

    def __init__(self, layer: Layer, sink: Sink) -> None:
        self._layer = layer
        self._calls = [LinearCall(layer, sink, autocast) for autocast in (False, True)]

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self._layer.module
        weight, bias = module.weight, module.bias
        if (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or self._layer.excluded
            or not (type(input) in _PLAIN or is_dtensor(input))
            or is_dtensor(input) != is_dtensor(weight)
            or not (weight.requires_grad or (bias is not None and bias.requires_grad))
            or tensor_hooked(weight)
            or (bias is not None and tensor_hooked(bias))
        ):
            return torch.nn.functional.linear(input, weight, bias)
        device = weight.device.type
        autocast = torch.is_autocast_enabled(device) and input.dtype != torch.float64
        if autocast:
            input = input.to(torch.get_autocast_dtype(device))
        return deferred_linear(input, weight, bias, self._calls[autocast])

    def is_own(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        """Whether these are the arguments of ``F.linear`` in the layer's own forward."""
        module: Any = self._layer.module
        return weight is module.weight and bias is module.bias

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled layer gets its own class's forward."""
        return own_forward, (self._layer.module,)


class _Wrapped:
    """The forward of a Linear that was replaced before, with its products deferred."""

    def __init__(self, replaced: Any, forward: _Forward) -> None:
        self._replaced, self._defer = replaced, _DeferProducts(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._replaced(*args, **kwargs)
        with self._defer:
            return self._replaced(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._replaced,)


def _same(replaced: Any) -> Any:
    return replaced


class _DeferProducts(TorchFunctionMode):
    """Calls ``forward`` instead of ``F.linear`` with the layer's own parameters."""

    def __init__(self, forward: _Forward) -> None:
        super().__init__()
        self._forward = forward

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.linear and self._forward.is_own(*args, **kwargs):
            return self._forward(args[0] if args else kwargs["input"])
        return function(*args, **kwargs)


_PLAIN = (Tensor, nn.Parameter)
