"""W: computes the gradients that waited, and adds them up as autograd does."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from pipemorph_trainer.executor.grad_form import as_grad, grad_dtype
from pipemorph_trainer.executor.split.sinks import Work
from pipemorph_trainer.executor.stages.written import written


def run_weight_work(work: list[Work]) -> None:
    """Run W: compute the deferred gradients and add them to ``.grad``. Empties ``work``.

    The contributions of a weight that is used several times in one backward are summed in B's
    order, and then added to ``.grad`` once, like in autograd: in the dtype of the gradient, but for
    those of a weight that autocast has cast, which autograd sums before it casts them back. A
    backward inside a backward, as of a reentrant checkpoint, adds to ``.grad`` by itself.

    Raises :class:`SplitError` if an operand was overwritten since B.
    """
    left = Counter((item.task, id(parameter)) for item in work for parameter in item.parameters)
    sums: dict[tuple[int, int], Tensor] = {}
    work.reverse()
    with torch.no_grad():
        while work:
            item = work.pop()
            item.check_unchanged()
            for parameter, found in zip(item.parameters, item.gradients(), strict=True):
                key = item.task, id(parameter)
                left[key] -= 1
                cast = found.dtype != parameter.dtype
                grad = found if cast else found.to(grad_dtype(parameter))
                partial = sums.pop(key, None)
                total = grad if partial is None else partial + grad
                if left[key]:
                    sums[key] = total
                else:
                    accumulate(parameter, total)


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add a gradient to ``parameter.grad``, which gets the form that autograd gives it."""
    if parameter.grad is None:
        parameter.grad = as_grad(parameter, grad)
    else:
        parameter.grad.add_(grad.to(grad_dtype(parameter)))
    written(parameter)
