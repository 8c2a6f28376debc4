"""Private attributes of torch that the split backward needs, with a check of each.

:func:`find_missing_features` runs once at the start. With a torch in which one of them has changed,
the backward is fused, with a reason, instead of giving wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.utils._device import DeviceContext


def has_gradient_hooks(tensor: Tensor) -> bool:
    """True if a tensor has gradient hooks or post-accumulate-grad hooks."""
    raw: Any = tensor
    return bool(raw._backward_hooks) or bool(raw._post_accumulate_grad_hooks)


def is_compiled(module: nn.Module) -> bool:
    """True if calling the module runs compiled code: ``torch.compile`` or ``.compile()``."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def read_version(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor; -1 if torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def read_versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return :func:`read_version` of each tensor."""
    return [-1 if each.is_inference() else each._version for each in tensors]


top_saving_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)
"""``top_saving_hooks(False)``: hooks on the tensors that functions save, as under activation
checkpointing; None without any."""


def count_storage_holders(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors that share a storage. torch also counts the Python object
    ``storage``, which is subtracted."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


@cache
def find_holder_count_problem() -> str:
    """Return the reason why :func:`count_storage_holders` is not reliable with this torch; empty if
    it is."""
    try:
        tensor = torch.zeros(1)
        counts = [count_storage_holders(tensor.untyped_storage())]
        alias = tensor.detach()
        counts.append(count_storage_holders(tensor.untyped_storage()))
        del alias
        counts.append(count_storage_holders(tensor.untyped_storage()))
    except AttributeError as error:
        return str(error)
    return "" if counts == [1, 2, 1] else f"tensors of a storage are counted {counts}, not 1, 2, 1"


current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that runs in this thread; unique to it."""


def will_accumulate(node: Node) -> bool:
    """True if the running backward adds to the ``.grad`` of this node's leaf. False if the gradient
    is not needed, or is a result of ``torch.autograd.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def is_accumulator_held(parameter: Tensor) -> bool:
    """True if something refers to the node that adds to a leaf's ``.grad``, while no graph does.

    Hooks of that node cannot be seen, but torch makes a node anew if nothing refers to it.
    """
    with torch.enable_grad():
        _find_accumulator(parameter).metadata[_MARK] = True
        return bool(_find_accumulator(parameter).metadata.pop(_MARK, False))


_MARK = "pipemorph"


def _find_accumulator(parameter: Tensor) -> Any:
    made: Any = parameter.view_as(parameter).grad_fn
    return made.next_functions[0][0]


are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_tracing: Callable[[], bool] = torch._C._is_tracing
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def is_ordinary_call() -> bool:
    """True if a function called now computes what its name says, for an ordinary backward: not
    under a transform of torch.func, a trace, forward-mode gradients or a function mode."""
    return not (
        are_transforms_active()
        or forward_ad._current_level >= 0
        or is_tracing()
        or (count_function_modes() and _may_redefine_functions())
    )


def _may_redefine_functions() -> bool:
    """True if a function mode is on that may redefine functions: any but torch.device."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return not all(isinstance(mode, DeviceContext) for mode in modes)


def iterate_saved_tensors(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that a node of a graph has saved, without those that hooks replaced."""
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = [name for name in dir(node) if name.startswith("_raw_saved_")]
        _saved_names[kind] = names
    for name in names:
        found: Any = getattr(node, name)
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            value = saved.data
            if isinstance(value, Tensor):
                yield value


_saved_names: dict[type, list[str]] = {}


@cache
def find_missing_features() -> str:
    """Return the first attribute that this torch lacks, in one line; empty if it lacks none."""
    try:
        tensor: Any = nn.Parameter(torch.zeros(1))
        if has_gradient_hooks(tensor):
            return "a fresh parameter seems to have hooks"
        handle = tensor.register_post_accumulate_grad_hook(lambda _: None)
        seen = has_gradient_hooks(tensor)
        handle.remove()
        handle = tensor.register_hook(lambda grad: grad)
        seen = seen and has_gradient_hooks(tensor)
        handle.remove()
        if not seen:
            return "hooks on a parameter cannot be seen"
        if is_compiled(nn.Identity()):
            return "a fresh module seems to be compiled"
        held = is_accumulator_held(tensor), _find_accumulator(tensor)
        if held[0] or not is_accumulator_held(tensor):
            return "it cannot be seen whether the node of a gradient is held"
        if not is_ordinary_call() or current_graph_task() != -1 or will_accumulate(held[1]):
            return "a backward seems to run, or a transform"
        if len(list(iterate_saved_tensors((tensor * tensor).grad_fn))) != 2:
            return "saved tensors cannot be seen"
        before = read_version(tensor)
        with torch.no_grad():
            tensor.add_(1)
        if read_version(tensor) != before + 1:
            return "in-place writes are not counted"
    except AttributeError as error:
        return str(error)
    return ""
