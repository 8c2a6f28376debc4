"""The token that starts an iteration: each stage sends it to the next one, from stage 0 on.

It contains the iteration, the plan version that all stages of the column run in it, and whether
shapes follow. Before it has arrived, a stage does nothing that depends on the plan.
"""

from __future__ import annotations

from typing import Any

from pipemorph.api.mesh import Coordinate
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.call import Generations, Start, name_call
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.links.link import Neighbourhood
from pipemorph_trainer.links.peer_socket import StepToken
from pipemorph_trainer.plans.agreement import Agreement


class TokenPass:
    """Receives the token of every iteration from the stage above and sends it to the one below.

    ``agreement``: chooses the version on stage 0.
    """

    def __init__(
        self,
        coordinate: Coordinate,
        neighbours: Neighbourhood,
        mail: Mailbox,
        agreement: Agreement,
    ) -> None:
        self._coordinate, self._mail, self._agreement = coordinate, mail, agreement
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self._shapes: Any = None
        self.generations = Generations()

    def arrived(self) -> bool:
        """Whether :meth:`start` and the exchange of shapes that it announces would not wait. Not on
        stage 0."""
        assert self._up is not None
        socket = self._up.socket
        if not socket.tokens:
            socket.pump()
        if not socket.tokens:
            return False
        token = socket.tokens[0]
        has_shapes = token.generation == self.generations.above or token.refused
        return has_shapes or bool(socket.shapes)

    def start(
        self, iteration: int, shapes: Any, *, refused: bool = False, evaluation: bool = False
    ) -> tuple[int, Start]:
        """Start an iteration, or the ``evaluation`` before it, on this stage. Waits for the token,
        except on stage 0. Returns the version of its plan; an evaluation keeps the current one.

        ``shapes``: signature of what this rank gives to its stage; if it changes, shapes are
        exchanged with all stages below. ``refused``: the input of this rank does not fit. Raises
        :class:`PipelineError` if the stage above begins another iteration.
        """
        up = self._up
        above, below = self.generations
        from_above = to_below = cut_off = False
        if not refused:
            to_below = bool(shapes != self._shapes)
            self._shapes = shapes
        if up is None:
            version = self._agreement.current if evaluation else self._agreement.choose()
        else:
            token = self._mail.await_queue(up, f"stage {up.peer_stage} to begin", up.socket.tokens)
            if token.iteration != iteration or token.evaluation != evaluation:
                raise PipelineError(
                    f"{self._coordinate} begins {name_call(iteration, evaluation)}, stage "
                    f"{up.peer_stage} {name_call(token.iteration, token.evaluation)}; every rank "
                    "has to call step() and evaluate() in the same order"
                )
            version = token.version
            self._check(token, up.peer_stage)
            from_above = token.generation != above
            above = token.generation
            cut_off = token.refused
        to_below = to_below or from_above
        refused = refused or cut_off
        self.generations = Generations(above, below + to_below)
        if self._down is not None:
            self._down.socket.send_token(
                StepToken(
                    iteration, version, self.generations.below, refused, evaluation,
                    self._agreement.digest(version),
                )
            )  # fmt: skip
        return version, Start(from_above, to_below, refused, cut_off)

    def _check(self, token: StepToken, above: int) -> None:
        mine = self._agreement.digest(token.version)
        # A version that is not held is an error of its own, see PlanBook.commit().
        if mine and token.digest and mine != token.digest:
            raise PipelineError(
                f"plan {token.version} of {self._coordinate} is {mine:08x}, that of stage {above} "
                f"{token.digest:08x}; one version must name one plan: run one control loop per job"
            )

    def restart(self) -> None:
        """Exchange shapes again in the next iteration: this one was refused, and some stages may
        not know its shapes."""
        self._shapes = None
