"""The token that starts an iteration: from stage 0 down, from stage to stage.

It says which iteration, which plan and whether shapes follow, so ranks that disagree find out
at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.links.link import Neighbourhood
from pipemorph_trainer.links.peer_socket import StepToken
from pipemorph_trainer.topology.coordinate import Coordinate


class Start(NamedTuple):
    """How an iteration begins on a stage.

    ``handshake``: shapes are exchanged in it. ``refused``: it was given a batch that does not
    fit, or a stage above was; then ``cut_off``: nothing comes from above.
    """

    handshake: bool
    refused: bool
    cut_off: bool


class TokenPass:
    """Takes the token of every iteration from the stage above and gives it to the one below."""

    def __init__(self, coordinate: Coordinate, neighbours: Neighbourhood, mail: Mailbox) -> None:
        self._coordinate, self._mail = coordinate, mail
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self._shapes: Any = None
        self.generation = 0
        """Of shapes: one more whenever they change."""

    def start(self, iteration: int, version: int, shapes: Any, *, refused: bool = False) -> Start:
        """Start the iteration from stage 0 down.

        ``version``: the plan's. ``shapes``: of what stage 0 was given; compared with ``==``.
        ``refused``: what this rank was given does not fit.
        Raises :class:`PipelineError` if the stage above begins another iteration or plan.
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
        """Shapes are exchanged anew in the next iteration: this one was refused, and not every
        stage may know its shapes."""
        self._shapes = None
