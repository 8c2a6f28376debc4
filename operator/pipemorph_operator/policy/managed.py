"""Whose job is it."""

from __future__ import annotations

from pipemorph_operator.names import CONTROLLER


def is_ours(managed_by: str | None) -> bool:
    """Whether this operator reconciles a job with that ``spec.managedBy``."""
    return managed_by in (None, "", CONTROLLER)
