"""What ends a training run, worded so that the missing message or the lost peer is named."""

from __future__ import annotations

from pipemorph.errors import InputError, PipeMorphError


def first_sentence(error: BaseException) -> str:
    """What went wrong, of an error of torch: without the place in its sources it starts with
    and the advice it ends with."""
    lines = str(error).splitlines()
    line = lines[0] if lines else type(error).__name__
    if line.startswith("[/"):
        line = line.split("] ", 1)[-1]
    return line.split(". ", 1)[0][:200]


class PipelineError(PipeMorphError):
    """The pipeline cannot go on; the message says who waited for what, and why."""


class WaitTimeoutError(PipelineError):
    """A message did not come within its deadline. Names the message, the link and the route."""


class PeerLostError(PipelineError):
    """A neighbour closed its connection without a goodbye: it died or was killed."""


class ShapeError(PipelineError):
    """Tensors do not have the shapes agreed on; names both."""


class BatchError(ShapeError, InputError):
    """Some rank was given a batch that does not fit; names the rank and what does not fit.

    Raised by ``step`` on every rank of the job. No gradient has changed, and the next ``step``
    may go on.
    """


class SplitError(RuntimeError):
    """A stage cannot do what was asked of it; the message names the module or parameter."""
