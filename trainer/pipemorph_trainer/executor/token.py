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

    ``handshake``: shapes are exchanged. ``refused``: the batch of this stage or of a stage above
    does not fit. ``cut_off``: a stage above refused, so that nothing comes from above.
    """

    handshake: bool
    refused: bool
    cut_off: bool


class TokenPass:
    """Receives the token of every iteration from the stage above and sends it to the one below."""

    def __init__(self, coordinate: Coordinate, neighbours: Neighbourhood, mail: Mailbox) -> None:
        self._coordinate, self._mail = coordinate, mail
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self._shapes: Any = None
        self.generation = 0
        """Number of shape changes so far."""

    def start(self, iteration: int, version: int, shapes: Any, *, refused: bool = False) -> Start:
        """Start an iteration on this stage.

        ``version``: of the plan. ``shapes``: signature of the inputs of stage 0. ``refused``: the
        input of this rank does not fit. Raises :class:`PipelineError` if the stage above begins
        another iteration or plan.
        """
        up = self._up
        handshake = cut_off = False
        if up is None and not refused:
            handshake = bool(shapes != self._shapes)
            self._shapes = shapes
            self.generation += handshake
        elif up is not None:
            token = self._mail.await_queue(up, f"stage {up.peer_stage} to begin", up.socket.tokens)
            if token.iteration != iteration or token.version != version:
                raise PipelineError(
                    f"{self._coordinate} begins iteration {iteration} with plan {version}, stage "
                    f"{up.peer_stage} iteration {token.iteration} with plan {token.version}; "
                    "every rank has to call step() the same number of times"
                )
            handshake = token.generation != self.generation
            self.generation = token.generation
            cut_off = token.refused
        refused = refused or cut_off
        if self._down is not None:
            self._down.socket.send_token(StepToken(iteration, version, self.generation, refused))
        return Start(handshake, refused, cut_off)

    def restart(self) -> None:
        """Exchange shapes again in the next iteration: this one was refused, and some stages may
        not know its shapes."""
        self._shapes = None
