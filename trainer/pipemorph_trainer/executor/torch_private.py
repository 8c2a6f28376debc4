"""The private attributes of torch that the split backward needs, with a check of each.

:func:`missing` runs once at the start. With a torch in which one of them has changed, the backward
is fused, with a reason, instead of giving wrong gradients.
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


def tensor_hooked(tensor: Tensor) -> bool:
    """Whether a tensor has gradient hooks or post-accumulate-grad hooks."""
    raw: Any = tensor
    return bool(raw._backward_hooks) or bool(raw._post_accumulate_grad_hooks)


def compiled(module: nn.Module) -> bool:
    """Whether calling the module runs compiled code: ``torch.compile`` or ``.compile()``."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def version(tensor: Tensor) -> int:
    """Number of in-place writes to a tensor; -1 if torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """:func:`version` of each tensor."""
    return [-1 if each.is_inference() else each._version for each in tensors]


saving_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)
"""``saving_hooks(False)``: the hooks that take the tensors that functions save, as under activation
checkpointing; None without any."""


def holders(storage: torch.UntypedStorage) -> int:
    """Number of tensors that share a storage. torch also counts the Python object ``storage``,
    which is subtracted."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


@cache
def holders_unknown() -> str:
    """Why :func:`holders` is not reliable with this torch; empty if it is."""
    try:
        tensor = torch.zeros(1)
        counts = [holders(tensor.untyped_storage())]
        alias = tensor.detach()
        counts.append(holders(tensor.untyped_storage()))
        del alias
        counts.append(holders(tensor.untyped_storage()))
    except AttributeError as error:
        return str(error)
    return "" if counts == [1, 2, 1] else f"tensors of a storage are counted {counts}, not 1, 2, 1"


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread; each has another."""


def accumulates(node: Node) -> bool:
    """Whether the backward that runs adds to the ``.grad`` of the leaf of this node. False if it
    is not wanted, or wanted as the result of ``torch.autograd.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def accumulator_held(parameter: Tensor) -> bool:
    """Whether something holds the node that adds to the ``.grad`` of a leaf, while no graph has it.

    Hooks of that node cannot be seen. But a node that nothing holds is made anew each time.
    """
    with torch.enable_grad():
        _accumulator(parameter).metadata[_MARK] = True
        return bool(_accumulator(parameter).metadata.pop(_MARK, False))


_MARK = "pipemorph"


def _accumulator(parameter: Tensor) -> Any:
    made: Any = parameter.view_as(parameter).grad_fn
    return made.next_functions[0][0]


transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
tracing: Callable[[], bool] = torch._C._is_tracing
function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def ordinary_call() -> bool:
    """Whether a function called now computes what its name says, for a backward of the usual kind:
    not under a transform of torch.func, a trace, forward-mode gradients or a function mode."""
    return not (
        transforms_active()
        or forward_ad._current_level >= 0
        or tracing()
        or (function_modes() and _redefined())
    )


def _redefined() -> bool:
    """Whether a function mode is on that may redefine functions: another than torch.device."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return not all(isinstance(mode, DeviceContext) for mode in modes)


def saved_tensors(node: Node) -> Iterator[Tensor]:
    """The tensors that a node of a graph has saved, without those that hooks have replaced."""
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
def missing() -> str:
    """What this torch lacks of the above, in one line; empty if it lacks nothing."""
    try:
        tensor: Any = nn.Parameter(torch.zeros(1))
        if tensor_hooked(tensor):
            return "a fresh parameter seems to have hooks"
        handle = tensor.register_post_accumulate_grad_hook(lambda _: None)
        seen = tensor_hooked(tensor)
        handle.remove()
        handle = tensor.register_hook(lambda grad: grad)
        seen = seen and tensor_hooked(tensor)
        handle.remove()
        if not seen:
            return "hooks on a parameter cannot be seen"
        if compiled(nn.Identity()):
            return "a fresh module seems to be compiled"
        held = accumulator_held(tensor), _accumulator(tensor)
        if held[0] or not accumulator_held(tensor):
            return "it cannot be told whether the node of a gradient is held"
        if not ordinary_call() or graph_task() != -1 or accumulates(held[1]):
            return "a backward seems to run, or a transform"
        if len(list(saved_tensors((tensor * tensor).grad_fn))) != 2:
            return "saved tensors cannot be seen"
        before = version(tensor)
        with torch.no_grad():
            tensor.add_(1)
        if version(tensor) != before + 1:
            return "in-place writes are not counted"
    except AttributeError as error:
        return str(error)
    return ""
