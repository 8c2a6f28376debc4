"""Errors of the trainer. Their messages name the missing message, the lost peer, or the input."""

from __future__ import annotations

from pipemorph.errors import PipeMorphError


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error of torch, without the source location before it and the advice
    after it."""
    lines = str(error).splitlines()
    line = lines[0] if lines else type(error).__name__
    if line.startswith("[/"):
        line = line.split("] ", 1)[-1]
    return line.split(". ", 1)[0][:200]


class PipelineError(PipeMorphError):
    """The pipeline cannot continue. The message says which rank waited for what, and why."""


class UnwrittenError(PipelineError):
    """A checkpoint cannot be written, as on a full disk. Training can go on; ``save`` can be called
    again."""


class WaitTimeoutError(PipelineError):
    """A message missed its deadline. The error names the message, the link and the route."""


class PeerLostError(PipelineError):
    """A neighbour's connection closed without a goodbye: the neighbour failed or was killed."""


class ShapeError(PipelineError):
    """Tensors have other shapes than agreed. The error names both."""


class BatchError(ShapeError):
    """A rank got a batch that does not fit. The error names the rank and the input.

    ``step`` raises it on every rank of the job. No gradient has changed, and ``step`` can be called
    again.
    """


class SplitError(RuntimeError):
    """A stage cannot be run as requested. The message names the module or parameter."""
