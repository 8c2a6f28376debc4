"""The few attributes of torch read here that have no public name, with a check of each.

Nothing else in this package touches a private name of torch. :func:`missing` runs once at
start-up; a torch that has moved one of these gets fused backwards and a reason, not a wrong
gradient.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks


def tensor_hooked(tensor: Tensor) -> bool:
    """Whether gradient or post-accumulate-grad hooks sit on a tensor."""
    raw: Any = tensor
    return bool(raw._backward_hooks) or bool(raw._post_accumulate_grad_hooks)


def module_backward_hooked(module: nn.Module) -> bool:
    """Whether a module, or every module, has backward hooks."""
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
    """How often a tensor was written in place; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors share a storage. A Python object of a storage counts as one as well,
    so ``storage`` itself is taken off."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


@cache
def holders_unknown() -> str:
    """Why :func:`holders` cannot be relied on in this torch; empty if it can."""
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
    """What this torch lacks of the above, in one line; empty if nothing."""
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
