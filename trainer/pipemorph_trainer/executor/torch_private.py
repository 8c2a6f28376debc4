"""The private attributes of torch that the split backward needs, with a check of each.

:func:`missing` runs once at the start. With a torch in which one of them has changed, the backward
is fused, with a reason, instead of giving wrong gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks


def tensor_hooked(tensor: Tensor) -> bool:
    """Whether a tensor has gradient hooks or post-accumulate-grad hooks."""
    raw: Any = tensor
    return bool(raw._backward_hooks) or bool(raw._post_accumulate_grad_hooks)


def module_backward_hooked(module: nn.Module) -> bool:
    """Whether a module has backward hooks, or there are global ones for all modules."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or module_hooks._global_backward_hooks
        or module_hooks._global_backward_pre_hooks
    )


def compiled(module: nn.Module) -> bool:
    """Whether calling the module runs compiled code: ``torch.compile`` or ``.compile()``."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def version(tensor: Tensor) -> int:
    """Number of in-place writes to a tensor; -1 if torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def saving_is_hooked() -> bool:
    """Whether hooks take the tensors that functions save, as under activation checkpointing."""
    found: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return found is not None and found(False) is not None


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
        module = nn.Identity()
        if module_backward_hooked(module) or compiled(module):
            return "a fresh module seems to have backward hooks or to be compiled"
        module.register_full_backward_hook(lambda *_: None)
        if not module_backward_hooked(module):
            return "backward hooks on a module cannot be seen"
        before = version(tensor)
        with torch.no_grad():
            tensor.add_(1)
        if version(tensor) != before + 1:
            return "in-place writes are not counted"
    except AttributeError as error:
        return str(error)
    return ""
