"""Errors of the trainer. Their messages name the missing message, the lost peer, or the input."""

from __future__ import annotations

from pipemorph.errors import PipeMorphError


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error of torch, without its source location and advice."""
    lines = str(error).splitlines()
    line = lines[0] if lines else type(error).__name__
    if line.startswith("[/"):
        line = line.split("] ", 1)[-1]
    return line.split(". ", 1)[0][:200]


class PipelineError(PipeMorphError):
    """Error after which the pipeline cannot continue. Names the rank, its wait, and the cause."""


class UnwrittenError(PipelineError):
    """Error of a checkpoint that cannot be written, as on a full disk. Training can go on; ``save``
    can be called again."""


class WaitTimeoutError(PipelineError):
    """Error of a message that missed its deadline. Names the message, the link and the route."""


class PeerLostError(PipelineError):
    """Error of a neighbour whose connection closed without a goodbye: it failed or was killed."""


class ShapeError(PipelineError):
    """Error of tensors with other shapes than agreed. Names both."""


class BatchError(ShapeError):
    """Error of a batch that does not fit. Names the rank and the input.

    ``step`` raises it on every rank of the job. No gradient has changed, and ``step`` can be called
    again.
    """


class SplitError(RuntimeError):
    """Error of a stage that cannot run as requested. Names the module or parameter."""
