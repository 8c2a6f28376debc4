"""The token that starts an iteration: each stage sends it to the next one, from stage 0 on.

It contains the iteration, the plan version and whether shapes follow, so that ranks notice at once
if they disagree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipemorph.api.mesh import Coordinate
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.links.link import Neighbourhood
from pipemorph_trainer.links.peer_socket import StepToken


class Start(NamedTuple):
    """How an iteration begins on a stage.

    ``shapes_from_above``, ``shapes_to_below``: whether shapes are exchanged with this neighbour.
    ``refused``: the batch of this stage or of a stage above does not fit. ``cut_off``: a stage
    above refused, so that nothing comes from above.
    """

    shapes_from_above: bool = False
    shapes_to_below: bool = False
    refused: bool = False
    cut_off: bool = False


class Generations(NamedTuple):
    """Number of shape exchanges so far with each neighbour."""

    above: int = 0
    below: int = 0


def name_call(iteration: int, evaluation: bool) -> str:
    """Name of a call of ``step`` or ``evaluate`` for messages."""
    return (
        f"the evaluation before iteration {iteration}" if evaluation else f"iteration {iteration}"
    )


class TokenPass:
    """Receives the token of every iteration from the stage above and sends it to the one below."""

    def __init__(self, coordinate: Coordinate, neighbours: Neighbourhood, mail: Mailbox) -> None:
        self._coordinate, self._mail = coordinate, mail
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self._shapes: Any = None
        self.generations = Generations()

    def start(
        self,
        iteration: int,
        version: int,
        shapes: Any,
        *,
        refused: bool = False,
        evaluation: bool = False,
    ) -> Start:
        """Start an iteration, or the ``evaluation`` before it, on this stage.

        ``version``: of the plan. ``shapes``: signature of what this rank gives to its stage; if it
        changes, shapes are exchanged with all stages below. ``refused``: the input of this rank
        does not fit. Raises :class:`PipelineError` if the stage above begins another iteration or
        plan.
        """
        up = self._up
        above, below = self.generations
        from_above = to_below = cut_off = False
        if not refused:
            to_below = bool(shapes != self._shapes)
            self._shapes = shapes
        if up is not None:
            token = self._mail.await_queue(up, f"stage {up.peer_stage} to begin", up.socket.tokens)
            if token[:2] != (iteration, version) or token.evaluation != evaluation:
                raise PipelineError(
                    f"{self._coordinate} begins {name_call(iteration, evaluation)} with plan "
                    f"{version}, stage {up.peer_stage} "
                    f"{name_call(token.iteration, token.evaluation)} with plan {token.version}; "
                    "every rank has to call step() and evaluate() in the same order"
                )
            from_above = token.generation != above
            above = token.generation
            cut_off = token.refused
        to_below = to_below or from_above
        refused = refused or cut_off
        self.generations = Generations(above, below + to_below)
        if self._down is not None:
            self._down.socket.send_token(
                StepToken(iteration, version, self.generations.below, refused, evaluation)
            )
        return Start(from_above, to_below, refused, cut_off)

    def restart(self) -> None:
        """Exchange shapes again in the next iteration: this one was refused, and some stages may
        not know its shapes."""
        self._shapes = None
