"""The token that starts an iteration: from stage 0 down, from stage to stage.

It says which iteration, which plan and whether shapes follow, so ranks that disagree find out
at once.
"""

from __future__ import annotations

from typing import Any

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.loop import Executor
from pipemorph_trainer.links import Neighbourhood, Seat
from pipemorph_trainer.paths.line import StepToken


class TokenPass:
    """Takes the token of every iteration from the stage above and gives it to the one below."""

    def __init__(self, seat: Seat, neighbours: Neighbourhood, executor: Executor) -> None:
        self._seat, self._executor = seat, executor
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self._shapes: Any = None
        self.generation = 0
        """Of shapes: one more whenever they change."""

    def start(self, iteration: int, version: int, shapes: Any) -> bool:
        """Start the iteration from stage 0 down; True if shapes are to be exchanged in it.

        ``version``: the plan's. ``shapes``: of what stage 0 was given; compared with ``==``.
        Raises :class:`PipelineError` if the stage above begins another iteration or plan.
        """
        up = self._up
        if up is None:
            handshake = bool(shapes != self._shapes)
            self._shapes = shapes
            self.generation += handshake
        else:
            token = self._executor.await_line(up, f"stage {up.peer_stage} to begin", up.line.tokens)
            if token.iteration != iteration or token.version != version:
                raise PipelineError(
                    f"{self._seat} begins iteration {iteration} with plan {version}, stage "
                    f"{up.peer_stage} iteration {token.iteration} with plan {token.version}; "
                    "every rank has to call step() the same number of times"
                )
            handshake = token.generation != self.generation
            self.generation = token.generation
        if self._down is not None:
            self._down.line.send_token(StepToken(iteration, version, self.generation))
        return handshake
