"""Functions of the user, in addition to torch's, whose weight gradients wait for W.

Such a function runs with weights that need no gradient, so that autograd computes the gradient of
its input alone. A second function follows that passes the output on, and in B stores the arguments
and the output's gradient for W.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from pipemorph_trainer.autograd_internals import is_ordinary_call, read_version
from pipemorph_trainer.backward import function_patches, work_collector
from pipemorph_trainer.backward.gradient_comparison import compare_gradients
from pipemorph_trainer.backward.work_collector import WeightWork
from pipemorph_trainer.errors import SplitError

WeightGradients = Callable[..., Mapping[str, Tensor]]


def register_function(
    place: Any, name: str, weights: Sequence[str], gradients: WeightGradients
) -> None:
    """Register a Python function whose weight gradients W computes, as it does for ``F.linear``.

    ``place``, ``name``: a module or class, and its attribute that callers look up at each call.
    ``weights``: the arguments that are weights. The function returns one tensor that is linear in
    each of them.

    ``gradients(grad, **arguments)``, with the output's gradient and all arguments, detached,
    returns the gradient of every weight that is trained, by its argument, in the weight's shape. It
    is called in W without grad mode, and must not write to its arguments. For results equal to the
    bit it must use the operators that autograd does; ``split="verify"`` compares.

    Raises ``TypeError`` if the function is not one of Python, or has no such arguments.
    """
    original = getattr(place, name, None)
    if not inspect.isfunction(original):
        raise TypeError(f"register_function got {name!r} of {place!r}; expected a Python function")
    signature = inspect.signature(original)
    if unknown := set(weights) - set(signature.parameters):
        raise TypeError(f"{name} has no argument {min(unknown)!r}; expected names of its weights")
    made = _RegisteredFunction(original, signature, tuple(weights), gradients)

    @wraps(original)
    def call_deferred(*args: Any, **kwargs: Any) -> Tensor:
        return made.call_deferred(*args, **kwargs)

    function_patches.register_replacement(place, name, original, call_deferred)


class _RegisteredFunction(NamedTuple):
    original: Callable[..., Tensor]
    signature: inspect.Signature
    weights: tuple[str, ...]
    gradients: WeightGradients

    def call_original(self, arguments: Mapping[str, Any]) -> Tensor:
        """Call the original with all of its arguments by name."""
        bound = inspect.BoundArguments(self.signature, OrderedDict(arguments))
        return self.original(*bound.args, **bound.kwargs)

    def call_deferred(self, *args: Any, **kwargs: Any) -> Tensor:
        if (
            torch.compiler.is_compiling()
            or not work_collector.active_collectors
            or not torch.is_grad_enabled()
        ):
            return self.original(*args, **kwargs)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        own = {name: given[name] for name in self.weights if _is_trained(given[name])}
        known = {
            name: work_collector.find_trained_parameter(each) if each.is_leaf else None
            for name, each in own.items()
        }
        owners = [each for each in known.values() if each is not None]
        if not owners:
            return self.original(*args, **kwargs)
        plain = all(type(each) is nn.Parameter for each in own.values())
        if len(owners) < len(own) or not plain or not is_ordinary_call() or any(
            each.excluded for each in owners
        ):  # fmt: skip
            for each in own.values():
                function_patches.exclude_parameter(
                    each, f"it is used in {self.original.__name__} in an unusual way"
                )
            return self.original(*args, **kwargs)
        apart = {
            name: each.detach() if isinstance(each, Tensor) else each
            for name, each in given.items()
        }
        out = self.call_original(given | {name: apart[name] for name in own})
        if type(out) is not Tensor:
            raise SplitError(
                f"{self.original.__name__} returned a {type(out).__name__}; a function whose weight"
                " gradients wait for W returns one tensor"
            )
        result: Tensor = _PassedOutput.apply(out, self, given, apart, tuple(own), *own.values())
        return result


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _PassedOutput(torch.autograd.Function):
    """Function that passes an output on, and defers the work for the weights to W."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, out: Tensor, function: _RegisteredFunction, given: dict[str, Any],
        apart: dict[str, Any], names: tuple[str, ...], *own: nn.Parameter,
    ) -> Tensor:  # fmt: skip
        ctx.function, ctx.names, ctx.own = function, names, own
        tensors = {name: each for name, each in apart.items() if isinstance(each, Tensor)}
        ctx.others = {name: each for name, each in apart.items() if name not in tensors}
        ctx.kinds = tuple(tensors)
        ctx.save_for_backward(*tensors.values())
        # Arguments with their graph, for a second differentiation.
        ctx.given = dict(given)
        return function_patches.alias_memory(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        function: _RegisteredFunction = ctx.function
        apart = ctx.others | dict(zip(ctx.kinds, ctx.saved_tensors, strict=True))
        none = (None,) * 4
        if torch.is_grad_enabled():
            for each in ctx.own:
                function_patches.exclude_parameter(each, function_patches.SECOND_ORDER)
            out = function.call_original(ctx.given)
            return (grad, *none, *torch.autograd.grad(out, ctx.own, grad, create_graph=True))
        work = FunctionWork(function, apart, grad, ctx.names, ctx.own)
        nodes = [node for node, _ in ctx.next_functions[1:]]
        owners = function_patches.find_deferring_owners(zip(nodes, ctx.own, strict=True))
        if owners is None:
            found = [g.to(p.dtype) for g, p in zip(work.compute_gradients(), ctx.own, strict=True)]
            return (grad, *none, *found)
        work.owners = owners
        collector = owners[0].collector
        collector.add_work(work)
        if collector.verify:

            def run(*weights: Tensor) -> Tensor:
                return function.call_original(apart | dict(zip(ctx.names, weights, strict=True)))

            needed, got = [True] * len(ctx.own), work.compute_gradients()
            compare_gradients(collector, owners[0].name, run, ctx.own, needed, grad, got, ctx.names)
        return (grad, *none, *(None for _ in ctx.own))


function_patches.deferrable_node_types.append(cast(Any, _PassedOutput)._backward_cls)


class FunctionWork(WeightWork):
    """Data that W needs from one call: its arguments and the output's gradient."""

    __slots__ = ("_arguments", "_function", "_grad", "_names", "_versions")

    def __init__(
        self,
        function: _RegisteredFunction,
        arguments: dict[str, Any],
        grad: Tensor,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(parameters, ())
        self._function, self._arguments, self._grad = function, arguments, grad
        self._names = names
        self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        return [
            read_version(each)
            for name, each in {**self._arguments, "": self._grad}.items()
            if isinstance(each, Tensor) and name not in self._names
        ]

    def check_unchanged(self) -> None:
        if self._versions != self._read_versions():
            raise SplitError(
                f"an argument of the call of {self._function.original.__name__} with"
                f" {self.owners[0].name!r}, or the gradient of its output, was written in place"
                " between B and W"
            )

    def compute_gradients(self) -> list[Tensor]:
        with torch.no_grad():
            found = self._function.gradients(self._grad, **self._arguments)
        given = {
            each.untyped_storage().data_ptr()
            for each in (self._grad, *self._arguments.values())
            if isinstance(each, Tensor)
        }
        grads = []
        for name, parameter in zip(self._names, self.parameters, strict=True):
            grad = found.get(name)
            if grad is None or grad.shape != parameter.shape:
                what = "nothing" if grad is None else f"shape {tuple(grad.shape)}"
                raise SplitError(
                    f"the weight gradients registered for {self._function.original.__name__} gave"
                    f" {what} for {name!r}; expected shape {tuple(parameter.shape)}"
                )
            # `.grad` is written in place.
            grads.append(grad.clone() if grad.untyped_storage().data_ptr() in given else grad)
        return grads
