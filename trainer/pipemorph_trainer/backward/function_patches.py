"""Replacements of torch's functions during F and B, so that weight gradients can wait for W.

Layers look up ``F.linear`` and similar functions as module attributes at each call. During an op
these attributes are ours. Ours do nothing special in code that torch compiles, and for any but the
parameters of the stages whose F or B runs. So layers stay unchanged: whatever forward a layer has
at its next call simply runs.

The backward decides whether the gradients of a call wait, since hooks, other uses, and whether the
gradient goes to ``.grad`` are known only there.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from pipemorph_trainer.autograd_internals import (
    are_transforms_active,
    count_function_modes,
    has_gradient_hooks,
    is_ordinary_call,
    is_tracing,
    read_versions,
    top_saving_hooks,
    will_accumulate,
)
from pipemorph_trainer.backward import work_collector
from pipemorph_trainer.backward.gradient_comparison import compare_gradients
from pipemorph_trainer.backward.weight_products import (
    AddmmProduct,
    BatchedProduct,
    ConvolutionProduct,
    EmbeddingProduct,
    Grad,
    GroupedProduct,
    LinearProduct,
    Operands,
    ParameterView,
    ViewGradient,
    ViewProduct,
    WeightProduct,
)
from pipemorph_trainer.backward.work_collector import TrainedParameter, WeightWork
from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.topology.placement import is_dtensor

log = logging.getLogger(__name__)

_PLAIN = (Tensor, nn.Parameter)
_torch_functions: Any = torch._C._VariableFunctions
"""Torch's own functions, whatever has replaced its attributes since."""
SECOND_ORDER = "its gradient is differentiated again"

# --- the backward ---------------------------------------------------------------------------------


class ProductWork(WeightWork):
    """Data that W needs from one call. ``needed``: whether weight and bias get a gradient."""

    __slots__ = ("_bias", "_needed", "_product", "_versions", "_weight", "operands")

    def __init__(
        self,
        product: WeightProduct,
        operands: Operands,
        *,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        needed: Sequence[bool],
        owners: Sequence[TrainedParameter],
    ) -> None:
        parameters = [weight] if needed[0] else []
        if needed[1] and bias is not None:
            parameters.append(bias)
        super().__init__(parameters, owners)
        self._product, self.operands, self._needed = product, operands, needed
        self._weight, self._bias = weight, bias
        self._versions = read_versions(operands)

    @property
    def uses_values(self) -> bool:
        return self._product.uses_values

    def check_unchanged(self) -> None:
        if self._versions != read_versions(self.operands):
            raise SplitError(
                f"the input of the call with {self.owners[0].name!r}, or the gradient of its"
                " output, was written in place between B and W"
            )

    def compute_gradients(self) -> Sequence[Grad]:
        return self._product.weight_grads(self.operands, self._weight, self._bias, self._needed)


class ProductCall(torch.autograd.Function):
    """Call of a :class:`WeightProduct`. It saves the operands, and computes the gradients.

    ``cast``: autocast has cast ``x``. ``operands``: a list to fill with the operands for
    :class:`_LinearOutput`; the output is then a placeholder of the product's shape without memory.
    None: the output is the product.
    """

    allocates = True

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: WeightProduct,
        cast: bool,
        operands: list[Tensor | None] | None,
    ) -> Tensor:
        ctx.product, ctx.own, ctx.cast = product, (weight, bias), cast
        if product.parameter_view is not None:
            weight = product.parameter_view.view_of(weight)
        if cast:
            # Cast here, since autocast's cache could return a cast without gradients to calls that
            # need them.
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        # An operand that is not saved may be written to.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        if operands is None:
            out = product.run(x, weight, bias)
            return out if out._base is None else alias_memory(out)
        operands += [x, weight, bias]
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        own, bias = ctx.own
        need_x, *needed = ctx.needs_input_grad[:3]
        product: WeightProduct = ctx.product
        if torch.is_grad_enabled():
            return (*_differentiate_again(ctx, x, grad), None, None, None)
        operands = product.select_operands(x, grad)
        grad_x = product.input_grad(x, operands, weight) if need_x else None
        if not any(needed):
            return grad_x, None, None, None, None, None
        # A bias that is None has no node.
        behind = ctx.next_functions
        uses = [(behind[1][0], own)] if needed[0] else []
        if needed[1]:
            uses.append((behind[2][0], bias))
        owners = find_deferring_owners(uses)
        if owners is None:
            grads = product.weight_grads(operands, own, bias, needed)
            late = [
                _expand_gradient(p, g).to(p.dtype) for (_, p), g in zip(uses, grads, strict=True)
            ]
            first = late[0] if needed[0] else None
            return grad_x, first, late[-1] if needed[1] else None, None, None, None
        collector = owners[0].collector
        work = ProductWork(product, operands, weight=own, bias=bias, needed=needed, owners=owners)
        collector.add_work(work)
        if collector.verify:
            dtype = x.dtype if ctx.cast else own.dtype
            used = x, _view_weight(product, own).to(dtype), None if bias is None else bias.to(dtype)
            got = [grad_x] * need_x
            got += [g.grad if isinstance(g, ViewGradient) else g for g in work.compute_gradients()]
            compare_gradients(
                collector, owners[0].name, product.run, used, (need_x, *needed), grad, got
            )
        return grad_x, None, None, None, None, None


def _view_weight(product: WeightProduct, own: Tensor) -> Tensor:
    return own if product.parameter_view is None else product.parameter_view.view_of(own)


def _expand_gradient(parameter: Tensor, grad: Grad) -> Tensor:
    return grad.expand_to_parameter(parameter) if isinstance(grad, ViewGradient) else grad


class _LinearOutput(torch.autograd.Function):
    """Product of a linear; its gradient goes to the function that saved the operands."""

    allocates = True

    @staticmethod
    def forward(ctx: Any, place: Tensor, product: WeightProduct, operands: list[Any]) -> Tensor:
        x, weight, bias = operands
        return _without_view(product.run(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


def is_deferrable_node(node: Any) -> bool:
    """True if a node of a graph can defer gradients to W."""
    return isinstance(node, tuple(deferrable_node_types))


deferrable_node_types: list[Any] = [cast(Any, ProductCall)._backward_cls]
"""Classes of nodes that can defer gradients to W."""


def _without_view(out: Tensor) -> Tensor:
    """Return the tensor as no view, with the same memory.

    Up to torch 2.11 the output of a linear is a view if its input has more than two dimensions, and
    a view that a custom function returns cannot be written in place.
    """
    return out if out._base is None else alias_memory(out)


def alias_memory(out: Tensor) -> Tensor:
    """Return another tensor with the same memory, unknown to autograd."""
    other = torch.empty(0, dtype=out.dtype, device=out.device)
    return other.set_(out.untyped_storage(), out.storage_offset(), out.size(), out.stride())


def find_deferring_owners(
    uses: Iterable[tuple[Any, nn.Parameter]],
) -> list[TrainedParameter] | None:
    """Return the records of a call's parameters if its gradients wait for W; None if they must be
    computed now. ``uses``: each parameter that gets a gradient, and its graph node."""
    owners = []
    why = ""
    for node, parameter in uses:
        each = work_collector.known_parameters.get(id(parameter))
        if (
            each is None
            or each.parameter() is not parameter
            or each.collector not in work_collector.active_collectors
        ):
            each = work_collector.find_trained_parameter(parameter)
        if each is None or each.collector.work is None:
            return None
        owners.append(each)
        if why:
            continue
        if found := each.collector.find_obstacle(each, parameter):
            why = f"{each.name}: {found}"
        elif not will_accumulate(node):
            why = f"{each.name}: its gradient goes to torch.autograd.grad"
    for each in owners if why else ():
        each.collector.computed_in_b[each.name] = why.removeprefix(f"{each.name}: ")
    return None if why else owners


def _differentiate_again(ctx: Any, x: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Return gradients that have a graph: those of the original function."""
    own, bias = ctx.own
    dtype = x.dtype if ctx.cast else own.dtype
    for parameter in (own, bias):
        exclude_parameter(parameter, SECOND_ORDER)
    needed = ctx.needs_input_grad[:3]
    weight = _view_weight(ctx.product, own).to(dtype)
    out = ctx.product.run(x, weight, None if bias is None else bias.to(dtype))
    wanted = [each for each, need in zip((x, own, bias), needed, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]


def exclude_parameter(parameter: Any, why: str) -> None:
    """Exclude a stage's parameter from deferral for good, so that autograd sums its gradients."""
    each = (
        work_collector.find_trained_parameter(parameter)
        if isinstance(parameter, nn.Parameter)
        else None
    )
    if each is not None and not each.excluded:
        each.excluded = why


# --- the functions --------------------------------------------------------------------------------


def _admits_call(x: Any, weight: Any, bias: Any, fits: Callable[[], bool]) -> bool:
    """True if the weight gradients of a call may wait. If they may not and it has parameters of a
    stage, these are excluded, since their other uses must not wait either.

    ``fits``: returns True if the shapes and further arguments are usual.
    """
    if not torch.is_grad_enabled():
        return False
    found: list[TrainedParameter] = []
    why = ""
    for each in (weight, bias):
        if not isinstance(each, Tensor) or not each.requires_grad:
            continue
        known = work_collector.find_trained_parameter(each) if each.is_leaf else None
        if known is None:
            why = why or "it is used together with a weight that is computed, or not of this stage"
        else:
            found.append(known)
            why = why or (known.excluded and f"{known.name}: {known.excluded}")
    if not found:
        return False
    if not why and not _are_plain_tensors(x, weight, bias):
        kinds = {type(each).__name__ for each in (x, weight, bias) if each is not None}
        why = f"its operands are not plain tensors: {', '.join(sorted(kinds))}"
    if not why and not is_ordinary_call():
        why = "it is used under a transform or a function mode"
    if not why and not fits():
        why = "it is used with unusual shapes or arguments"
    for known in found if why else ():
        known.excluded = known.excluded or why
    return not why


def _are_plain_tensors(x: Any, weight: Any, bias: Any) -> bool:
    if type(weight) is nn.Parameter:
        kinds = type(x) in _PLAIN and (bias is None or type(bias) in _PLAIN)
    else:
        kinds = is_dtensor(weight) and is_dtensor(x) and (bias is None or is_dtensor(bias))
    strided = weight.layout is torch.strided and x.layout is torch.strided
    return kinds and strided and weight.is_floating_point() and not x.is_nested


def _apply_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: WeightProduct
) -> Tensor:
    """Call the product as autocast would."""
    device = weight.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    if cast:
        x = x.to(torch.get_autocast_dtype(device))
    result: Tensor
    if type(product) is not LinearProduct or top_saving_hooks(False) is None or is_dtensor(x):
        result = ProductCall.apply(x, weight, bias, product, cast, None)
        return result
    # A function saves its tensors when it ends, torch's own linear before its product. Activation
    # checkpointing recomputes up to the last saved tensor, so without that product. Hence a
    # function of their own saves the operands.
    operands: list[Tensor | None] = []
    place = ProductCall.apply(x, weight, bias, product, cast, operands)
    result = _LinearOutput.apply(place, product, operands)
    return result


def _is_autocast_cached(x: Tensor, weight: Tensor) -> bool:
    """True if autocast casts an input once for several calls."""
    return (
        x.is_leaf and x.requires_grad and x.dtype is torch.float32 and not x._is_view()
        and torch.is_autocast_enabled(weight.device.type) and torch.is_autocast_cache_enabled()
    )  # fmt: skip


def _is_plain_matrix(weight: Tensor, bias: Tensor | None, dimension: int) -> bool:
    return weight.dim() == 2 and (bias is None or bias.shape == weight.shape[dimension:][:1])


def _is_known_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if :func:`_admits_call` has admitted this linear before, with the same parameters, and
    the conditions that can change still hold."""
    known, catching = (
        work_collector.known_parameters.get(id(weight)),
        work_collector.active_collectors,
    )
    if known is None or known.parameter() is not weight or known.excluded:
        return False
    other = None if bias is None else work_collector.known_parameters.get(id(bias))
    if (
        known.linear_with is not other
        or known.collector not in catching
        or not weight.requires_grad
    ):
        return False
    if bias is not None:
        if other is None or other.excluded or other.collector not in catching:
            return False
        same = bias.requires_grad and other.parameter() is bias
        if not same or bias.numel() != weight.size(0):
            return False
    ordinary = not (
        are_transforms_active()
        or is_tracing()
        or count_function_modes()
        or forward_ad._current_level >= 0
    )
    return (
        ordinary and type(x) is Tensor and torch.is_grad_enabled() and x.layout is torch.strided
        and not (x.is_leaf and x.requires_grad) and not x.is_nested and x.dim() > 0
    )  # fmt: skip


_VIEWS = frozenset(("SelectBackward0", "TransposeBackward0", "PermuteBackward0", "TBackward0"))


def _resolve_parameter(weight: Any, product: WeightProduct) -> tuple[Any, WeightProduct]:
    """Return the parameter whose gradient may wait, and the product with it. If ``weight`` is a
    view of a parameter by one op, as ``P[e]``, it is that parameter; else both are unchanged."""
    base = weight._base if isinstance(weight, Tensor) and weight.grad_fn is not None else None
    if base is None or type(base) is not nn.Parameter or not base.is_contiguous():
        return weight, product
    shown = type(weight.grad_fn).__name__ in _VIEWS and weight.dtype is base.dtype
    if not shown or weight.grad_fn.next_functions[0][0].variable is not base:
        return weight, product
    if has_gradient_hooks(weight) or weight.retains_grad:
        return weight, product
    offset = weight.storage_offset() - base.storage_offset()
    return base, ViewProduct(product, ParameterView(weight.size(), weight.stride(), offset))


_linear: Callable[..., Tensor] = torch._C._nn.linear
_addmm: Callable[..., Tensor] = _torch_functions.addmm
_embedding: Callable[..., Tensor] = _torch_functions.embedding
_bmm: Callable[..., Tensor] = _torch_functions.bmm
_einsum: Callable[..., Tensor] = torch.functional.einsum
_grouped: Callable[..., Tensor] = getattr(_torch_functions, "_grouped_mm", _bmm)
_LINEAR, _ADDMM = (
    LinearProduct(_linear),
    AddmmProduct(lambda x, weight, bias: _addmm(bias, x, weight)),
)
_BMM = BatchedProduct(lambda x, weight, bias: _bmm(x, weight))


def _linear_call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling() or not work_collector.active_collectors:
        return _linear(input, weight, bias)
    if not _is_known_linear(input, weight, bias):
        usual = lambda: (  # noqa: E731
            _is_plain_matrix(weight, bias, 0)
            and input.dim() > 0
            and not _is_autocast_cached(input, weight)
        )
        whole, product = _resolve_parameter(weight, _LINEAR)
        if not _admits_call(input, whole, bias, usual):
            return _linear(input, weight, bias)
        if whole is not weight:
            return _apply_product(input, whole, bias, product)
        known = work_collector.known_parameters.get(id(weight))
        plain = type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)
        if known is not None and plain:
            known.linear_with = (
                None if bias is None else work_collector.known_parameters.get(id(bias))
            )
    return _apply_product(input, weight, bias, _LINEAR)


def _addmm_call(*args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling() or not work_collector.active_collectors:
        return _addmm(*args, **kwargs)
    if len(args) != 3:
        for each in (*args, *kwargs.values()):
            exclude_parameter(each, "it is used with unusual arguments")
        return _addmm(*args, **kwargs)
    bias, x, weight = args
    usual = lambda: (  # noqa: E731
        not kwargs and _is_plain_matrix(weight, bias, 1) and x.dim() == 2 and not is_dtensor(weight)
        and not _is_autocast_cached(x, weight)
    )  # fmt: skip
    if not _admits_call(x, weight, bias, usual):
        return _addmm(*args, **kwargs)
    return _apply_product(x, weight, bias, _ADDMM)


def _bmm_call(*args: Any, **kwargs: Any) -> Tensor:
    if (
        torch.compiler.is_compiling()
        or not work_collector.active_collectors
        or len(args) != 2
        or kwargs
    ):
        return _bmm(*args, **kwargs)
    found = _call_batched(*args, _BMM)
    return _bmm(*args) if found is None else found


def _call_batched(
    x: Tensor, weight: Tensor, product: WeightProduct, *, casts: bool = True
) -> Tensor | None:
    """Compute a product per expert if its gradient may wait. ``casts``: autocast casts it."""
    whole, product = _resolve_parameter(weight, product)
    usual = lambda: (  # noqa: E731
        x.dim() == weight.dim() == 3 and not is_dtensor(whole) and not _is_autocast_cached(x, whole)
        and (casts or not torch.is_autocast_enabled(whole.device.type))
    )  # fmt: skip
    return _apply_product(x, whole, None, product) if _admits_call(x, whole, None, usual) else None


_EXPERTS = re.compile(r"(\w)(\w)(\w),\1(?:\3(\w)|(\w)\3)->\1\2(?:\4|\5)")
"""Equations of a product per expert: ``ecd,edf->ecf``, ``ecd,efd->ecf``."""


def _einsum_call(*args: Any) -> Tensor:
    if torch.compiler.is_compiling() or not work_collector.active_collectors or len(args) != 3:
        return _einsum(*args)
    equation, x, weight = args
    letters = _EXPERTS.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    usual = letters and all(
        isinstance(each, Tensor) and each.dim() == 3 and min(each.shape) > 1 for each in args[1:]
    )
    if not letters or not usual or len({*filter(None, letters.groups())}) < 4:
        return _einsum(*args)
    across = letters[5] is not None

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _einsum(equation, x, weight.transpose(1, 2) if across else weight)

    found = _call_batched(
        x, weight.transpose(1, 2) if across else weight, BatchedProduct(run), casts=False
    )
    return _einsum(*args) if found is None else found


def _grouped_call(*args: Any, **kwargs: Any) -> Tensor:
    ends = kwargs.get("offs")
    if (
        torch.compiler.is_compiling()
        or not work_collector.active_collectors
        or len(args) != 2
        or ends is None
    ):
        return _grouped(*args, **kwargs)
    x, weight = args
    whole, product = _resolve_parameter(weight, GroupedProduct(_grouped, ends))
    usual = lambda: (  # noqa: E731
        all(value is None for name, value in kwargs.items() if name != "offs")
        and x.dim() == 2 and weight.dim() == 3 and x.is_contiguous()
        and not is_dtensor(whole) and not torch.is_autocast_enabled(whole.device.type)
    )  # fmt: skip
    if not _admits_call(x, whole, None, usual):
        return _grouped(*args, **kwargs)
    return _apply_product(x, whole, None, product)


def _embedding_call(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, *rest: bool, **kwargs: bool
) -> Tensor:
    settings = (padding_idx, *_embedding_flags(*rest, **kwargs))
    if torch.compiler.is_compiling() or not work_collector.active_collectors:
        return _embedding(weight, indices, *settings)
    usual = lambda: type(indices) is Tensor and not settings[2] and not is_dtensor(weight)  # noqa: E731
    if not _admits_call(weight, weight, None, usual):
        return _embedding(weight, indices, *settings)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _embedding(weight, x, *settings)

    result: Tensor = ProductCall.apply(
        indices, weight, None, EmbeddingProduct(run, settings), False, None
    )
    return result


def _embedding_flags(scale_grad_by_freq: bool = False, sparse: bool = False) -> tuple[bool, bool]:
    return scale_grad_by_freq, sparse


def _make_convolution(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return two functions for ``F.conv*`` or ``F.conv_transpose*``: torch's own, and ours."""
    function: Callable[..., Tensor] = getattr(_torch_functions, name)
    transposed = "transpose" in name

    def call_convolution(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **kwargs: Any
    ) -> Tensor:
        if torch.compiler.is_compiling() or not work_collector.active_collectors:
            return function(input, weight, bias, *rest, **kwargs)
        made: list[tuple[Any, ...]] = []

        def is_usual() -> bool:
            found = (_transposed_settings if transposed else _convolution_settings)(
                weight, *rest, **kwargs
            )
            made.extend([found] if found is not None else [])
            channels = weight.shape[1] * found[-1] if transposed and found else weight.shape[0]
            return (
                bool(made)
                and input.dim() in (weight.dim(), weight.dim() - 1)
                and not is_dtensor(weight)
                and (bias is None or bias.shape == (channels,))
                and not _is_autocast_cached(input, weight)
            )

        if not _admits_call(input, weight, bias, is_usual):
            return function(input, weight, bias, *rest, **kwargs)
        alone = input.dim() < weight.dim()

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return function(x, weight, bias, *rest, **kwargs)

        x = input.unsqueeze(0) if alone else input
        out = _apply_product(x, weight, bias, ConvolutionProduct(run, made[0]))
        return out.squeeze(0) if alone else out

    return function, call_convolution


def _convolution_settings(
    weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Any, ...] | None:
    """Return the settings for a convolution's backward; None if padding differs between sides."""
    n = weight.dim() - 2
    spread = _expand_setting(dilation, n)
    if padding == "same":
        both = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
        if any(each % 2 for each in both):
            return None
        padding = [each // 2 for each in both]
    sides = [0] * n if padding == "valid" else _expand_setting(padding, n)
    return _expand_setting(stride, n), sides, spread, False, [0] * n, groups


def _transposed_settings(  # noqa: PLR0917  torch's order
    weight: Tensor, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1,
    dilation: Any = 1,
) -> tuple[Any, ...]:  # fmt: skip
    n = weight.dim() - 2
    more = _expand_setting(output_padding, n)
    return (
        _expand_setting(stride, n),
        _expand_setting(padding, n),
        _expand_setting(dilation, n),
        True,
        more,
        groups,
    )


def _expand_setting(value: Any, dimensions: int) -> list[int]:
    """Return a setting for each dimension; a single number counts for all."""
    if not isinstance(value, Sequence):
        return [value] * dimensions
    return list(value) * (dimensions if len(value) == 1 else 1)


# --- their exchange -------------------------------------------------------------------------------


class _ReplacedFunction(NamedTuple):
    """Replaced function. ``get``, ``put``: read and write the attribute of its place, by name."""

    original: Callable[..., Any]
    ours: Callable[..., Any]
    get: Callable[[str], Any]
    put: Callable[[str, Any], None]


_replaced: dict[tuple[Any, str], _ReplacedFunction] = {}
"""Replaced functions by module or class, and name."""
_lock = threading.Lock()
_users = 0
_foreign_replacements: dict[str, str] = {}
"""Functions that other libraries have replaced, and the replacement; each is reported once."""


class patched_functions:
    """Context in which the functions are ours, for the whole process."""

    def __enter__(self) -> None:
        patch_functions()

    def __exit__(self, *_: object) -> None:
        restore_functions()


def patch_functions() -> None:
    """Begin :func:`patched_functions`. Functions replaced by other libraries stay unchanged."""
    global _users  # noqa: PLW0603
    with _lock:
        _users += 1
        if _users > 1:
            return
        for (place, name), (original, ours, get, put) in _replaced.items():
            if (now := get(name)) is original:
                put(name, ours)
            elif now is not ours and name not in _foreign_replacements:
                _foreign_replacements[name] = (
                    f"{getattr(now, '__module__', '')}.{getattr(now, '__name__', now)}"
                )
                log.warning(
                    "split backward: %s.%s was replaced by %s; its weight gradients stay in B",
                    place.__name__, name, _foreign_replacements[name],
                )  # fmt: skip


def restore_functions() -> None:
    """End :func:`patched_functions`."""
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users:
            return
        for (_, name), (original, ours, get, put) in _replaced.items():
            if get(name) is ours:
                put(name, original)


def register_replacement(
    place: Any, name: str, original: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    """Register a function for replacement. Raises ``TypeError`` if it is registered already."""
    if (place, name) in _replaced:
        raise TypeError(f"{name!r} of {place!r} was registered before")
    # A module first imported during an op may hold on to it, as inductor does by its name.
    ours.__name__ = getattr(original, "__name__", name)
    get: Callable[[str], Any] = partial(getattr, place)
    put: Callable[[str, Any], None] = partial(setattr, place)
    if isinstance(place, ModuleType):
        # Used for each op of a stage, so without a lookup through the module.
        get, put = vars(place).__getitem__, vars(place).__setitem__
    _replaced[place, name] = _ReplacedFunction(original, ours, get, put)


register_replacement(functional, "linear", _linear, _linear_call)
register_replacement(torch, "addmm", _addmm, _addmm_call)
register_replacement(torch, "embedding", _embedding, _embedding_call)
register_replacement(torch, "bmm", _bmm, _bmm_call)
register_replacement(torch, "einsum", _einsum, _einsum_call)
if hasattr(torch, "_grouped_mm"):
    register_replacement(torch, "_grouped_mm", _grouped, _grouped_call)
for _kind in ("conv", "conv_transpose"):
    for _name in (f"{_kind}1d", f"{_kind}2d", f"{_kind}3d"):
        register_replacement(functional, _name, *_make_convolution(_name))


def list_foreign_replacements() -> list[str]:
    """Describe the functions that other libraries have replaced."""
    return [f"{name} was replaced by {other}" for name, other in _foreign_replacements.items()]
