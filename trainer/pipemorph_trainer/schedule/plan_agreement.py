"""Agreement of a column on its next plan, and the token that starts an iteration with it.

A *column* is one pipeline: the stages that are connected by links. Each stage sends the versions
that it and all stages below hold to the stage above, whenever there is a new one. So stage 0 has
the versions that its whole column holds. At the beginning of an iteration it chooses the newest of
them, without waiting, and the token that starts the iteration carries it to the other stages. So
all stages of a column run one version in an iteration, and a plan that has reached all of them
during iteration t runs from iteration t+1 on.

Ranks receive plans at different times, and may miss one that was soon replaced. So a version is
eligible only if all stages hold exactly that one; the oldest of their newest ones may not be.

Replicas may change their version in different iterations, since sums of gradients do not depend on
the plan. Columns of one replica share collectives inside ops, such as those of a tensor
parallel group: they run one plan and must change it together. Their first stages agree in a small
collective at the beginning of every iteration. It also shares the costs of their microbatches: an
op takes as long as in the column with the most work, and all of them use the same order.

Each stage sends the token to the next one, from stage 0 on. It contains the iteration, the plan
version that all stages of the column run in it, whether shapes follow, and the costs and
the order of the microbatches. Before it has arrived, a stage does nothing that depends on the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.mailbox import Mailbox, name_call
from pipemorph_trainer.executor.microbatch_costs import MOST_COSTS, MicrobatchWork
from pipemorph_trainer.executor.stage_executor import CallStart, ShapeGenerations
from pipemorph_trainer.executor.waiting import CollectiveWaiter
from pipemorph_trainer.schedule.microbatch_orderer import MicrobatchOrderer
from pipemorph_trainer.schedule.plan_store import PlanStore
from pipemorph_trainer.transport.control_socket import StepToken
from pipemorph_trainer.transport.link import StageLinks

Costs = tuple[float, ...]
"""Costs of an iteration's microbatches; empty if unknown."""
CANDIDATES = 4
"""Number of versions that a column offers to those that must run the same one: the current one and
the newest others."""


class DrawnStart(NamedTuple):
    """Start of a stage whose inputs are drawn, see :meth:`TokenRelay.start_iteration`."""

    shapes: Any
    refused: bool
    costs: tuple[float, ...]


class HeldVersionsChannel(Protocol):
    """Part of a control socket that the agreement uses."""

    held: frozenset[int]
    """Versions that the neighbour and all stages below it hold."""
    on_held: Callable[[], None]
    """Called after :attr:`held` has changed."""

    def send_held(self, versions: frozenset[int]) -> None: ...


class PlanAgreement:
    """Agreement of a stage with its column. Main thread only.

    ``up``, ``down``: control sockets to the neighbours. ``together``: first stages of the columns
    that must run one version; None if this column may differ from all others. ``share_costs``: they
    also agree on the costs of their microbatches, of which all have as many.
    """

    def __init__(
        self,
        book: PlanStore,
        up: HeldVersionsChannel | None,
        down: HeldVersionsChannel | None,
        *,
        together: dist.ProcessGroup | None = None,
        wait: CollectiveWaiter | None = None,
        share_costs: bool = True,
    ) -> None:
        self._book, self._up, self._down = book, up, down
        self._together, self._wait_for, self._share_costs = together, wait, share_costs
        self._sent: frozenset[int] = frozenset()
        if down is not None:
            down.on_held = self.send_held_versions

    @property
    def current_version(self) -> int:
        """Version that this stage runs now."""
        return self._book.current_plan.version

    def find_digest(self, version: int) -> int:
        """Return the digest of a version's whole plan; 0 if this stage does not hold it."""
        return int(self._book.find_digest(version) or "0", 16)

    def list_held_versions(self) -> frozenset[int]:
        """Return versions newer than the current one that this stage and all stages below hold."""
        mine = self._book.list_held_versions()
        return mine if self._down is None else mine & self._down.held

    def send_held_versions(self) -> None:
        """Send the held versions to the stage above, if there is a new one. Call it after a plan
        was prepared."""
        held = self.list_held_versions()
        if self._up is not None and not held <= self._sent:
            self._up.send_held(held)
            self._sent = held

    def choose_version(self, costs: Costs = ()) -> tuple[int, Costs]:
        """Choose the version of the next iteration. Only on stage 0. Returns it with the costs of
        the microbatches: ``costs``, or the most of any column that must run the same version."""
        current = self.current_version
        if self._together is None:
            return max(self.list_held_versions(), default=current), costs
        newest = [current, *sorted(self.list_held_versions(), reverse=True)[: CANDIDATES - 1]]
        count = min(self._book.current_plan.microbatches, MOST_COSTS) if self._share_costs else 0
        # Versions fit into a double.
        mine = torch.tensor(
            [*newest, *[-1] * (CANDIDATES - len(newest)), *(costs or [0.0] * count)[:count]],
            dtype=torch.float64,
        )
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._together))]
        work = dist.all_gather(rows, mine, group=self._together, async_op=True)
        assert self._wait_for is not None
        self._wait_for(work, "the other columns to begin the iteration")
        versions = [set(map(int, row[:CANDIDATES].tolist())) for row in rows]
        most = torch.stack(rows)[:, CANDIDATES:].amax(dim=0)
        common = set(newest).intersection(*versions)
        return max(common), tuple(most.tolist()) if most.any() else ()

    def find_plan(self, version: int) -> RankPlan | None:
        """Find this stage's part of a version's plan; None if it does not hold it."""
        return self._book.find_plan(version)


class TokenRelay:
    """Relay of each iteration's token, from the stage above to the one below.

    ``agreement``: chooses the version on stage 0. ``orderer``: orders the microbatches there; None:
    they run in order.
    """

    def __init__(
        self,
        coordinate: Coordinate,
        neighbours: StageLinks,
        mail: Mailbox,
        agreement: PlanAgreement,
        orderer: MicrobatchOrderer | None = None,
    ) -> None:
        self._coordinate, self._mail, self._agreement = coordinate, mail, agreement
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self._orderer, self._work = orderer, MicrobatchWork()
        self._shapes: Any = None
        self.generations = ShapeGenerations()

    def can_start(self) -> bool:
        """True if neither :meth:`start_iteration` nor the exchange of shapes that the token
        announces would wait. Not on stage 0."""
        assert self._up is not None
        socket = self._up.socket
        if not socket.tokens:
            socket.read_arrived()
        if not socket.tokens:
            return False
        token = socket.tokens[0]
        has_shapes = token.generation == self.generations.above or token.refused
        return has_shapes or bool(socket.shapes)

    def start_iteration(
        self,
        iteration: int,
        shapes: Any,
        *,
        refused: bool = False,
        evaluation: bool = False,
        again: bool = False,
        costs: Costs = (),
        draw: Callable[[int], DrawnStart] | None = None,
    ) -> tuple[int, CallStart]:
        """Start an iteration, or the ``evaluation`` before it, on this stage. Waits for the token,
        except on stage 0. Returns the version of its plan; an evaluation, and an iteration that
        begins ``again``, use the current one.

        ``shapes``: signature of this rank's inputs to its stage; if it changes, shapes are
        exchanged with all stages below. ``refused``: the input of this rank does not fit.
        ``costs``: of the microbatches; those of stage 0 count on all stages. ``draw``: returns
        these three instead, for the version, once it is known. Raises
        :class:`PipelineError` if the stage above begins another iteration.
        """
        up = self._up
        above, below = self.generations
        from_above = to_below = cut_off = False
        if up is None:
            version = self._agreement.current_version
            work = self._work if again else MicrobatchWork()
            if not (evaluation or again):
                version, costs = self._agreement.choose_version(costs)
                work = self._work = MicrobatchWork(costs, self._order_microbatches(version, costs))
        else:
            token = self._mail.await_queue(up, f"stage {up.peer_stage} to begin", up.socket.tokens)
            if token.iteration != iteration or token.evaluation != evaluation:
                raise PipelineError(
                    f"{self._coordinate} begins {name_call(iteration, evaluation)}, stage "
                    f"{up.peer_stage} {name_call(token.iteration, token.evaluation)}; every rank "
                    "must call step() and evaluate() in the same order"
                )
            version, work = token.version, MicrobatchWork(token.costs, token.order)
            self._check_digest(token, up.peer_stage)
            from_above = token.generation != above
            above = token.generation
            cut_off = token.refused
        if draw is not None:
            drawn = draw(version)
            shapes, refused = drawn.shapes, drawn.refused
            if up is None:
                # Columns in lockstep would have to agree on the order once more.
                alone = self._coordinate.mesh.lockstep_size == 1
                order = self._order_microbatches(version, drawn.costs) if alone else ()
                work = self._work = MicrobatchWork(drawn.costs, order)
        if not refused:
            to_below = bool(shapes != self._shapes)
            self._shapes = shapes
        to_below = to_below or from_above
        refused = refused or cut_off
        self.generations = ShapeGenerations(above, below + to_below)
        if self._down is not None:
            self._down.socket.send_token(
                StepToken(
                    iteration, version, self.generations.below, refused, evaluation,
                    self._agreement.find_digest(version), *work,
                )
            )  # fmt: skip
        return version, CallStart(from_above, to_below, refused, cut_off, work)

    def _order_microbatches(self, version: int, costs: Costs) -> tuple[int, ...]:
        """Order the microbatches of an iteration, on stage 0. Empty: in order."""
        plan = self._agreement.find_plan(version) if self._orderer is not None else None
        if plan is None or self._orderer is None:
            return ()
        return self._orderer.order_microbatches(plan, costs)

    def _check_digest(self, token: StepToken, above: int) -> None:
        mine = self._agreement.find_digest(token.version)
        # PlanStore.commit_version() raises the error for a version that is not held.
        if mine and token.digest and mine != token.digest:
            raise PipelineError(
                f"plan {token.version} of {self._coordinate} is {mine:08x}, that of stage {above} "
                f"{token.digest:08x}; one version must name one plan: run one control loop per job"
            )

    def forget_shapes(self) -> None:
        """Exchange shapes again in the next iteration: this one was refused, and some stages may
        not have its shapes."""
        self._shapes = None
