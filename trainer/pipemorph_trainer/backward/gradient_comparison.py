"""Comparison of a deferred call's gradients with those of the original op: ``split="verify"``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipemorph_trainer.backward.work_collector import WorkCollector

log = logging.getLogger("pipemorph.trainer")
SHOWN = 20
"""Maximum number of parameters whose differences are reported."""


def compare_gradients(  # noqa: PLR0917
    collector: WorkCollector,
    name: str,
    run: Callable[..., Tensor],
    operands: Sequence[Any],
    needed: Sequence[bool],
    grad: Tensor,
    got: Sequence[Tensor | None],
    labels: Sequence[str] = ("input", "weight", "bias"),
) -> None:
    """Run the original op on detached operands, and compare. No user code runs again.

    ``name``: that of the call's first parameter; ``needed``: operands with a gradient; ``got``:
    their gradients from B and W. Reports the first difference of each parameter.
    """
    with torch.enable_grad():
        apart = [
            each.detach().requires_grad_(need) if isinstance(each, Tensor) else each
            for each, need in zip(operands, needed, strict=True)
        ]
        wanted = [each for each, need in zip(apart, needed, strict=True) if need]
        found = torch.autograd.grad(run(*apart), wanted, grad)
    labels = [what for what, need in zip(labels, needed, strict=True) if need]
    for label, want, have in zip(labels, found, got, strict=True):
        _report_difference(collector, name, f"the {label} of the call with", want, have, 0.0)


def compare_compiled(
    collector: WorkCollector, name: str, wanted: Sequence[Any], got: Sequence[Any], tolerance: float
) -> None:
    """Compare the gradients of cut code with those of the whole, relative to the largest element.
    ``name``: that of the first parameter whose gradient waits."""
    for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
        if isinstance(want, Tensor):
            _report_difference(
                collector, name, f"input {index} of the compiled code with", want, have, tolerance
            )


def _report_difference(  # noqa: PLR0917
    collector: WorkCollector,
    name: str,
    what: str,
    want: Tensor,
    have: Tensor | None,
    tolerance: float,
) -> None:
    collector.compared += 1
    assert have is not None
    if _are_equal(want, have):
        return
    most = float((want.double() - have.double()).abs().max())
    if most <= tolerance * float(want.double().abs().max()):
        return
    text = (
        f"the gradient of {what} {name!r}, {tuple(want.shape)}"
        f" {str(want.dtype).removeprefix('torch.')}, differs by up to {most:g}"
    )
    if name not in collector.different and len(collector.different) < SHOWN:
        collector.different[name] = text
        log.warning("split backward, verify: %s", text)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are equal; a NaN equals a NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    missing = a.isnan()
    return torch.equal(missing, b.isnan()) and torch.equal(a[~missing], b[~missing])
