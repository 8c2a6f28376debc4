"""Which plan a column runs next, and the token that starts an iteration with it.

A *column* is one pipeline: the stages that are connected by links. Each stage tells the stage
above which versions it and all stages below hold, as soon as there is a new one. So stage 0 knows
what its whole column holds. At the beginning of an iteration it chooses the newest of these
versions, without waiting, and the token that starts the iteration tells it to the other stages. So
all stages of a column run one version in an iteration, and a plan that has reached all of them
during iteration t runs from iteration t+1 on.

Ranks receive plans at different times, and may miss one that was soon replaced. So what counts is
whether all stages hold exactly that version, not the oldest of their newest ones.

Replicas may change their version in different iterations, since sums of gradients do not depend on
the plan. Columns of one replica share collectives inside ops, such as those of a tensor
parallel group: they run one plan and must change it together. Their first stages agree in a small
collective at the beginning of every iteration.

Each stage sends the token to the next one, from stage 0 on. It contains the iteration, the plan
version that all stages of the column run in it, and whether shapes follow. Before it has arrived, a
stage does nothing that depends on the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipemorph.api.mesh import Coordinate
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.dispatch import Generations, Start
from pipemorph_trainer.executor.mailbox import Mailbox, name_call
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.links.link import Neighbourhood
from pipemorph_trainer.links.peer_socket import StepToken
from pipemorph_trainer.plans.book import PlanBook

CANDIDATES = 4
"""Versions that a column offers to those that must run the same one: the current one and the newest
others."""


class Line(Protocol):
    """The part of a control socket that the agreement uses."""

    held: frozenset[int]
    """Versions that the neighbour and all stages below it hold."""
    on_held: Callable[[], None]
    """Called after :attr:`held` has changed."""

    def send_held(self, versions: frozenset[int]) -> None: ...


class Agreement:
    """One stage's part of the agreement of its column. Main thread only.

    ``up``, ``down``: the control sockets to the neighbours. ``together``: the first stages of the
    columns that must run one version; None if this column may differ from all others.
    """

    def __init__(
        self,
        book: PlanBook,
        up: Line | None,
        down: Line | None,
        *,
        together: dist.ProcessGroup | None = None,
        wait: CollectiveWait | None = None,
    ) -> None:
        self._book, self._up, self._down = book, up, down
        self._together, self._wait_for = together, wait
        self._told: frozenset[int] = frozenset()
        if down is not None:
            down.on_held = self.tell

    @property
    def current(self) -> int:
        """The version that this stage runs now."""
        return self._book.in_force.version

    def digest(self, version: int) -> int:
        """Names the whole plan of a version; 0 if this stage does not hold it."""
        return int(self._book.digest(version) or "0", 16)

    def held(self) -> frozenset[int]:
        """Versions newer than the current one that this stage and all stages below hold."""
        mine = self._book.held()
        return mine if self._down is None else mine & self._down.held

    def tell(self) -> None:
        """Tell the stage above what is held, if there is a new version. Call it after a plan was
        prepared."""
        held = self.held()
        if self._up is not None and not held <= self._told:
            self._up.send_held(held)
            self._told = held

    def choose(self) -> int:
        """The version of the next iteration. Only on stage 0."""
        current = self.current
        if self._together is None:
            return max(self.held(), default=current)
        newest = [current, *sorted(self.held(), reverse=True)[: CANDIDATES - 1]]
        mine = torch.tensor([*newest, *[-1] * (CANDIDATES - len(newest))])
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._together))]
        work = dist.all_gather(rows, mine, group=self._together, async_op=True)
        assert self._wait_for is not None
        self._wait_for(work, "the other columns to begin the iteration")
        common: set[int] = set(newest).intersection(*(row.tolist() for row in rows))
        return max(common)


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
        self,
        iteration: int,
        shapes: Any,
        *,
        refused: bool = False,
        evaluation: bool = False,
        again: bool = False,
    ) -> tuple[int, Start]:
        """Start an iteration, or the ``evaluation`` before it, on this stage. Waits for the token,
        except on stage 0. Returns the version of its plan; an evaluation, and an iteration that
        begins ``again``, keep the current one.

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
            keeps = evaluation or again
            version = self._agreement.current if keeps else self._agreement.choose()
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
