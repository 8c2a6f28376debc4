"""Replaces functions of torch while a stage's F or B runs, so that weight gradients can wait for W.

``F.linear`` and its like are attributes of their modules, which layers look up at each call. For
the time of an op they are ours. They are inert in code that torch compiles, and for all but the
parameters of the stages whose F or B runs. So layers stay what they are: whatever forward a layer
has at its next call simply runs.

Whether the gradients of a call wait is decided in the backward, when everything is known: hooks,
other uses, and whether the gradient goes to ``.grad`` at all.
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

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split import sinks
from pipemorph_trainer.executor.split.products import (
    Addmm,
    Batched,
    Convolution,
    Embedding,
    Grad,
    Grouped,
    Linear,
    OfPart,
    Operands,
    Part,
    PartGrad,
    Product,
)
from pipemorph_trainer.executor.split.sinks import Owned, Work
from pipemorph_trainer.executor.split.verifying import compare
from pipemorph_trainer.executor.torch_private import (
    accumulates,
    function_modes,
    ordinary_call,
    saving_hooks,
    tensor_hooked,
    tracing,
    transforms_active,
    versions,
)
from pipemorph_trainer.topology.placement import is_dtensor

log = logging.getLogger(__name__)

_PLAIN = (Tensor, nn.Parameter)
_torchs: Any = torch._C._VariableFunctions
"""Functions as torch has them, whatever has replaced its attributes since."""
SECOND_ORDER = "its gradient is differentiated again"

# --- the backward ---------------------------------------------------------------------------------


class ProductWork(Work):
    """What W needs of one call. ``needed``: whether weight and bias get a gradient."""

    __slots__ = ("_bias", "_needed", "_product", "_versions", "_weight", "operands")

    def __init__(
        self,
        product: Product,
        operands: Operands,
        *,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        needed: Sequence[bool],
        owners: Sequence[Owned],
    ) -> None:
        parameters = [weight] if needed[0] else []
        if needed[1] and bias is not None:
            parameters.append(bias)
        super().__init__(parameters, owners)
        self._product, self.operands, self._needed = product, operands, needed
        self._weight, self._bias = weight, bias
        self._versions = versions(operands)

    @property
    def uses_values(self) -> bool:
        return self._product.uses_values

    def check_unchanged(self) -> None:
        if self._versions != versions(self.operands):
            raise SplitError(
                f"the input of the call with {self.owners[0].name!r}, or the gradient of its"
                " output, was written in place between B and W"
            )

    def gradients(self) -> Sequence[Grad]:
        return self._product.weight_grads(self.operands, self._weight, self._bias, self._needed)


class Call(torch.autograd.Function):
    """A call of a :class:`Product`. It saves the operands, and computes the gradients.

    ``cast``: autocast has cast ``x``. ``operands``: a list to fill with what :class:`_Output`
    needs; then the output stands for the product, with its shape and without memory. With None the
    output is the product.
    """

    allocates = True

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        cast: bool,
        operands: list[Tensor | None] | None,
    ) -> Tensor:
        ctx.product, ctx.own, ctx.cast = product, (weight, bias), cast
        if product.part is not None:
            weight = product.part.of(weight)
        if cast:
            # Cast here and not by autocast, whose cache could return a cast without gradients to
            # calls that need them.
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        # What is not saved may be written to.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        if operands is None:
            out = product.run(x, weight, bias)
            return out if out._base is None else alone(out)
        operands += [x, weight, bias]
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        own, bias = ctx.own
        need_x, *needed = ctx.needs_input_grad[:3]
        product: Product = ctx.product
        if torch.is_grad_enabled():
            return (*_again(ctx, x, grad), None, None, None)
        operands = product.operands(x, grad)
        grad_x = product.input_grad(x, operands, weight) if need_x else None
        if not any(needed):
            return grad_x, None, None, None, None, None
        # A bias that is None has no node.
        behind = ctx.next_functions
        uses = [(behind[1][0], own)] if needed[0] else []
        if needed[1]:
            uses.append((behind[2][0], bias))
        owners = waiting(uses)
        if owners is None:
            grads = product.weight_grads(operands, own, bias, needed)
            late = [_dense(p, g).to(p.dtype) for (_, p), g in zip(uses, grads, strict=True)]
            first = late[0] if needed[0] else None
            return grad_x, first, late[-1] if needed[1] else None, None, None, None
        sink = owners[0].sink
        work = ProductWork(product, operands, weight=own, bias=bias, needed=needed, owners=owners)
        sink.add(work)
        if sink.verify:
            dtype = x.dtype if ctx.cast else own.dtype
            used = x, _weight(product, own).to(dtype), None if bias is None else bias.to(dtype)
            got = [grad_x] * need_x
            got += [g.grad if isinstance(g, PartGrad) else g for g in work.gradients()]
            compare(sink, owners[0].name, product.run, used, (need_x, *needed), grad, got)
        return grad_x, None, None, None, None, None


def _weight(product: Product, own: Tensor) -> Tensor:
    return own if product.part is None else product.part.of(own)


def _dense(parameter: Tensor, grad: Grad) -> Tensor:
    return grad.whole(parameter) if isinstance(grad, PartGrad) else grad


class _Output(torch.autograd.Function):
    """The product of a linear; its gradient goes to where the operands were saved."""

    allocates = True

    @staticmethod
    def forward(ctx: Any, place: Tensor, product: Product, operands: list[Any]) -> Tensor:
        x, weight, bias = operands
        return _apart(product.run(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


def is_call(node: Any) -> bool:
    """Whether a node of a graph can leave gradients to W."""
    return isinstance(node, tuple(nodes))


nodes: list[Any] = [cast(Any, Call)._backward_cls]
"""Classes of such nodes."""


def _apart(out: Tensor) -> Tensor:
    """The tensor without being a view.

    Up to torch 2.11 the output of a linear is a view if its input has more than two dimensions, and
    a view that a custom function returns cannot be written in place.
    """
    return out if out._base is None else alone(out)


def alone(out: Tensor) -> Tensor:
    """Another tensor with the same memory, of which autograd knows nothing."""
    other = torch.empty(0, dtype=out.dtype, device=out.device)
    return other.set_(out.untyped_storage(), out.storage_offset(), out.size(), out.stride())


def waiting(uses: Iterable[tuple[Any, nn.Parameter]]) -> list[Owned] | None:
    """What is known of the parameters of a call if its gradients wait for W; None if they are to be
    computed now. ``uses``: the node behind each parameter that gets a gradient."""
    owners = []
    why = ""
    for node, parameter in uses:
        each = sinks.known.get(id(parameter))
        if each is None or each.parameter() is not parameter or each.sink not in sinks.catching:
            each = sinks.owned(parameter)
        if each is None or each.sink.work is None:
            return None
        owners.append(each)
        if why:
            continue
        if found := each.sink.reason(each, parameter):
            why = f"{each.name}: {found}"
        elif not accumulates(node):
            why = f"{each.name}: its gradient goes to torch.autograd.grad"
    for each in owners if why else ():
        each.sink.whole[each.name] = why.removeprefix(f"{each.name}: ")
    return None if why else owners


def _again(ctx: Any, x: Tensor, grad: Tensor) -> list[Tensor | None]:
    """The gradients with a graph of their own: those of the original function."""
    own, bias = ctx.own
    dtype = x.dtype if ctx.cast else own.dtype
    for parameter in (own, bias):
        exclude(parameter, SECOND_ORDER)
    needed = ctx.needs_input_grad[:3]
    weight = _weight(ctx.product, own).to(dtype)
    out = ctx.product.run(x, weight, None if bias is None else bias.to(dtype))
    wanted = [each for each, need in zip((x, own, bias), needed, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]


def exclude(parameter: Any, why: str) -> None:
    """From now on no gradient of a stage's parameter waits, so that autograd sums all of them."""
    each = sinks.owned(parameter) if isinstance(parameter, nn.Parameter) else None
    if each is not None and not each.excluded:
        each.excluded = why


# --- the functions --------------------------------------------------------------------------------


def _admits(x: Any, weight: Any, bias: Any, fits: Callable[[], bool]) -> bool:
    """Whether the weight gradients of a call may wait. If they may not though it has parameters of
    a stage, these are excluded, since their other uses must not wait either.

    ``fits``: whether the shapes and further arguments are usual.
    """
    if not torch.is_grad_enabled():
        return False
    found: list[Owned] = []
    why = ""
    for each in (weight, bias):
        if not isinstance(each, Tensor) or not each.requires_grad:
            continue
        known = sinks.owned(each) if each.is_leaf else None
        if known is None:
            why = why or "it is used together with a weight that is computed, or not the stage's"
        else:
            found.append(known)
            why = why or (known.excluded and f"{known.name}: {known.excluded}")
    if not found:
        return False
    if not why and not _plain(x, weight, bias):
        kinds = {type(each).__name__ for each in (x, weight, bias) if each is not None}
        why = f"its operands are not plain tensors: {', '.join(sorted(kinds))}"
    if not why and not ordinary_call():
        why = "it is used under a transform or a function mode"
    if not why and not fits():
        why = "it is used with unusual shapes or arguments"
    for known in found if why else ():
        known.excluded = known.excluded or why
    return not why


def _plain(x: Any, weight: Any, bias: Any) -> bool:
    if type(weight) is nn.Parameter:
        kinds = type(x) in _PLAIN and (bias is None or type(bias) in _PLAIN)
    else:
        kinds = is_dtensor(weight) and is_dtensor(x) and (bias is None or is_dtensor(bias))
    strided = weight.layout is torch.strided and x.layout is torch.strided
    return kinds and strided and weight.is_floating_point() and not x.is_nested


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Make the call, as autocast would."""
    device = weight.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    if cast:
        x = x.to(torch.get_autocast_dtype(device))
    result: Tensor
    if type(product) is not Linear or saving_hooks(False) is None or is_dtensor(x):
        result = Call.apply(x, weight, bias, product, cast, None)
        return result
    # A function saves its tensors when it ends, torch's own linear before its product. Activation
    # checkpointing recomputes up to the last tensor saved, so not that product. So the operands are
    # saved by a function of their own.
    operands: list[Tensor | None] = []
    place = Call.apply(x, weight, bias, product, cast, operands)
    result = _Output.apply(place, product, operands)
    return result


def _cached(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast casts an input once for several calls."""
    return (
        x.is_leaf and x.requires_grad and x.dtype is torch.float32 and not x._is_view()
        and torch.is_autocast_enabled(weight.device.type) and torch.is_autocast_cache_enabled()
    )  # fmt: skip


def _of_rows(weight: Tensor, bias: Tensor | None, dimension: int) -> bool:
    return weight.dim() == 2 and (bias is None or bias.shape == weight.shape[dimension:][:1])


def _known(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a linear is one that :func:`_admits` has admitted before, of the same parameters, and
    what may have changed since then has not."""
    known, catching = sinks.known.get(id(weight)), sinks.catching
    if known is None or known.parameter() is not weight or known.excluded:
        return False
    other = None if bias is None else sinks.known.get(id(bias))
    if known.linear_with is not other or known.sink not in catching or not weight.requires_grad:
        return False
    if bias is not None:
        if other is None or other.excluded or other.sink not in catching:
            return False
        same = bias.requires_grad and other.parameter() is bias
        if not same or bias.numel() != weight.size(0):
            return False
    ordinary = not (
        transforms_active() or tracing() or function_modes() or forward_ad._current_level >= 0
    )
    return (
        ordinary and type(x) is Tensor and torch.is_grad_enabled() and x.layout is torch.strided
        and not (x.is_leaf and x.requires_grad) and not x.is_nested and x.dim() > 0
    )  # fmt: skip


_VIEWS = frozenset(("SelectBackward0", "TransposeBackward0", "PermuteBackward0", "TBackward0"))


def _of(weight: Any, product: Product) -> tuple[Any, Product]:
    """The parameter whose gradient may wait, and the product with it: of a weight that one op shows
    of a parameter, such as ``P[e]``, that parameter. Else both as they are."""
    base = weight._base if isinstance(weight, Tensor) and weight.grad_fn is not None else None
    if base is None or type(base) is not nn.Parameter or not base.is_contiguous():
        return weight, product
    shown = type(weight.grad_fn).__name__ in _VIEWS and weight.dtype is base.dtype
    if not shown or weight.grad_fn.next_functions[0][0].variable is not base:
        return weight, product
    if tensor_hooked(weight) or weight.retains_grad:
        return weight, product
    offset = weight.storage_offset() - base.storage_offset()
    return base, OfPart(product, Part(weight.size(), weight.stride(), offset))


_linear: Callable[..., Tensor] = torch._C._nn.linear
_addmm: Callable[..., Tensor] = _torchs.addmm
_embedding: Callable[..., Tensor] = _torchs.embedding
_bmm: Callable[..., Tensor] = _torchs.bmm
_einsum: Callable[..., Tensor] = torch.functional.einsum
_grouped: Callable[..., Tensor] = getattr(_torchs, "_grouped_mm", _bmm)
_LINEAR, _ADDMM = Linear(_linear), Addmm(lambda x, weight, bias: _addmm(bias, x, weight))
_BMM = Batched(lambda x, weight, bias: _bmm(x, weight))


def _linear_call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling() or not sinks.catching:
        return _linear(input, weight, bias)
    if not _known(input, weight, bias):
        usual = lambda: (  # noqa: E731
            _of_rows(weight, bias, 0) and input.dim() > 0 and not _cached(input, weight)
        )
        whole, product = _of(weight, _LINEAR)
        if not _admits(input, whole, bias, usual):
            return _linear(input, weight, bias)
        if whole is not weight:
            return _apply(input, whole, bias, product)
        known = sinks.known.get(id(weight))
        plain = type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)
        if known is not None and plain:
            known.linear_with = None if bias is None else sinks.known.get(id(bias))
    return _apply(input, weight, bias, _LINEAR)


def _addmm_call(*args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling() or not sinks.catching:
        return _addmm(*args, **kwargs)
    if len(args) != 3:
        for each in (*args, *kwargs.values()):
            exclude(each, "it is used with unusual arguments")
        return _addmm(*args, **kwargs)
    bias, x, weight = args
    usual = lambda: (  # noqa: E731
        not kwargs and _of_rows(weight, bias, 1) and x.dim() == 2 and not is_dtensor(weight)
        and not _cached(x, weight)
    )  # fmt: skip
    if not _admits(x, weight, bias, usual):
        return _addmm(*args, **kwargs)
    return _apply(x, weight, bias, _ADDMM)


def _bmm_call(*args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling() or not sinks.catching or len(args) != 2 or kwargs:
        return _bmm(*args, **kwargs)
    found = _batched(*args, _BMM)
    return _bmm(*args) if found is None else found


def _batched(x: Tensor, weight: Tensor, product: Product, *, casts: bool = True) -> Tensor | None:
    """A product per expert, if its weight gradient may wait. ``casts``: autocast knows it."""
    whole, product = _of(weight, product)
    usual = lambda: (  # noqa: E731
        x.dim() == weight.dim() == 3 and not is_dtensor(whole) and not _cached(x, whole)
        and (casts or not torch.is_autocast_enabled(whole.device.type))
    )  # fmt: skip
    return _apply(x, whole, None, product) if _admits(x, whole, None, usual) else None


_EXPERTS = re.compile(r"(\w)(\w)(\w),\1(?:\3(\w)|(\w)\3)->\1\2(?:\4|\5)")
"""Equations of a product per expert: ``ecd,edf->ecf``, ``ecd,efd->ecf``."""


def _einsum_call(*args: Any) -> Tensor:
    if torch.compiler.is_compiling() or not sinks.catching or len(args) != 3:
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

    found = _batched(x, weight.transpose(1, 2) if across else weight, Batched(run), casts=False)
    return _einsum(*args) if found is None else found


def _grouped_call(*args: Any, **kwargs: Any) -> Tensor:
    ends = kwargs.get("offs")
    if torch.compiler.is_compiling() or not sinks.catching or len(args) != 2 or ends is None:
        return _grouped(*args, **kwargs)
    x, weight = args
    whole, product = _of(weight, Grouped(_grouped, ends))
    usual = lambda: (  # noqa: E731
        all(value is None for name, value in kwargs.items() if name != "offs")
        and x.dim() == 2 and weight.dim() == 3 and x.is_contiguous()
        and not is_dtensor(whole) and not torch.is_autocast_enabled(whole.device.type)
    )  # fmt: skip
    if not _admits(x, whole, None, usual):
        return _grouped(*args, **kwargs)
    return _apply(x, whole, None, product)


def _embedding_call(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, *rest: bool, **kwargs: bool
) -> Tensor:
    settings = (padding_idx, *_flags(*rest, **kwargs))
    if torch.compiler.is_compiling() or not sinks.catching:
        return _embedding(weight, indices, *settings)
    usual = lambda: type(indices) is Tensor and not settings[2] and not is_dtensor(weight)  # noqa: E731
    if not _admits(weight, weight, None, usual):
        return _embedding(weight, indices, *settings)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _embedding(weight, x, *settings)

    result: Tensor = Call.apply(indices, weight, None, Embedding(run, settings), False, None)
    return result


def _flags(scale_grad_by_freq: bool = False, sparse: bool = False) -> tuple[bool, bool]:
    return scale_grad_by_freq, sparse


def _convolution(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Both of ``F.conv*`` or ``F.conv_transpose*``: torch's own, and ours."""
    function: Callable[..., Tensor] = getattr(_torchs, name)
    transposed = "transpose" in name

    def call(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **kwargs: Any
    ) -> Tensor:
        if torch.compiler.is_compiling() or not sinks.catching:
            return function(input, weight, bias, *rest, **kwargs)
        made: list[tuple[Any, ...]] = []

        def usual() -> bool:
            found = (_transposed if transposed else _settings)(weight, *rest, **kwargs)
            made.extend([found] if found is not None else [])
            channels = weight.shape[1] * found[-1] if transposed and found else weight.shape[0]
            return (
                bool(made)
                and input.dim() in (weight.dim(), weight.dim() - 1)
                and not is_dtensor(weight)
                and (bias is None or bias.shape == (channels,))
                and not _cached(input, weight)
            )

        if not _admits(input, weight, bias, usual):
            return function(input, weight, bias, *rest, **kwargs)
        alone = input.dim() < weight.dim()

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return function(x, weight, bias, *rest, **kwargs)

        x = input.unsqueeze(0) if alone else input
        out = _apply(x, weight, bias, Convolution(run, made[0]))
        return out.squeeze(0) if alone else out

    return function, call


def _settings(
    weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Any, ...] | None:
    """What the backward of a convolution needs; None if its padding is not the same on both
    sides."""
    n = weight.dim() - 2
    spread = _each(dilation, n)
    if padding == "same":
        both = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
        if any(each % 2 for each in both):
            return None
        padding = [each // 2 for each in both]
    sides = [0] * n if padding == "valid" else _each(padding, n)
    return _each(stride, n), sides, spread, False, [0] * n, groups


def _transposed(  # noqa: PLR0917  torch's order
    weight: Tensor, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1,
    dilation: Any = 1,
) -> tuple[Any, ...]:  # fmt: skip
    n = weight.dim() - 2
    more = _each(output_padding, n)
    return _each(stride, n), _each(padding, n), _each(dilation, n), True, more, groups


def _each(value: Any, dimensions: int) -> list[int]:
    """A setting for each dimension; one number stands for all."""
    if not isinstance(value, Sequence):
        return [value] * dimensions
    return list(value) * (dimensions if len(value) == 1 else 1)


# --- their exchange -------------------------------------------------------------------------------


class _Replaced(NamedTuple):
    """A function that is replaced. ``get``, ``put``: read and write the attribute of its place, by
    name."""

    original: Callable[..., Any]
    ours: Callable[..., Any]
    get: Callable[[str], Any]
    put: Callable[[str, Any], None]


_replaced: dict[tuple[Any, str], _Replaced] = {}
"""By module or class, and name."""
_lock = threading.Lock()
_users = 0
_taken: dict[str, str] = {}
"""Functions that others have replaced, and with what, each reported once."""


class patched:
    """Context in which the functions are ours, in the whole process."""

    def __enter__(self) -> None:
        patch()

    def __exit__(self, *_: object) -> None:
        unpatch()


def patch() -> None:
    """Begin :func:`patched`. A function that another library has replaced stays as it is."""
    global _users  # noqa: PLW0603
    with _lock:
        _users += 1
        if _users > 1:
            return
        for (place, name), (original, ours, get, put) in _replaced.items():
            if (now := get(name)) is original:
                put(name, ours)
            elif now is not ours and name not in _taken:
                _taken[name] = f"{getattr(now, '__module__', '')}.{getattr(now, '__name__', now)}"
                log.warning(
                    "split backward: %s.%s was replaced by %s; its weight gradients stay in B",
                    place.__name__, name, _taken[name],
                )  # fmt: skip


def unpatch() -> None:
    """End :func:`patched`."""
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users:
            return
        for (_, name), (original, ours, get, put) in _replaced.items():
            if get(name) is ours:
                put(name, original)


def add(place: Any, name: str, original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Add a function to those that are replaced. Raises ``TypeError`` if it is one already."""
    if (place, name) in _replaced:
        raise TypeError(f"{name!r} of {place!r} was registered before")
    # A module that is first imported during an op may keep it, as inductor does by its name.
    ours.__name__ = getattr(original, "__name__", name)
    get: Callable[[str], Any] = partial(getattr, place)
    put: Callable[[str, Any], None] = partial(setattr, place)
    if isinstance(place, ModuleType):
        # For each op of a stage, so without the way through the module.
        get, put = vars(place).__getitem__, vars(place).__setitem__
    _replaced[place, name] = _Replaced(original, ours, get, put)


add(functional, "linear", _linear, _linear_call)
add(torch, "addmm", _addmm, _addmm_call)
add(torch, "embedding", _embedding, _embedding_call)
add(torch, "bmm", _bmm, _bmm_call)
add(torch, "einsum", _einsum, _einsum_call)
if hasattr(torch, "_grouped_mm"):
    add(torch, "_grouped_mm", _grouped, _grouped_call)
for _kind in ("conv", "conv_transpose"):
    for _name in (f"{_kind}1d", f"{_kind}2d", f"{_kind}3d"):
        add(functional, _name, *_convolution(_name))


def taken() -> list[str]:
    """Replaced functions, in words."""
    return [f"{name} was replaced by {other}" for name, other in _taken.items()]
