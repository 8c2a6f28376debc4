"""Microbatches that ``step`` draws from a source, as many as the plan has for a replica.

A plan may give replicas different numbers of microbatches (``shares``), whose sum is always that of
equal shares. So a rank can draw its microbatches only once the ranks have agreed on the plan of the
iteration: it does so before it passes on the token that starts the iteration. Microbatches are
numbered over the whole run: each iteration has the next *N* × replicas of them, the first replica
the first ones. So the samples of an iteration do not depend on the plan, and no sample is lost or
used twice when shares change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from pipemorph.errors import InputError
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.errors import ShapeError
from pipemorph_trainer.executor.inputs import StepArguments
from pipemorph_trainer.executor.op_runner import ExternalStage
from pipemorph_trainer.sync.fingerprints import TensorDescription

WHOLE_BATCH_REFUSED = (
    "rebalance needs step(microbatches=SOURCE), where SOURCE is an iterator of microbatches or a"
    " function of their number: a batch that is passed whole has a fixed number of microbatches"
)


class Microbatch(NamedTuple):
    """Microbatch of a source. ``args``, ``kwargs``, ``target``: as those of ``step``, for one
    microbatch. ``weight``: that of its samples, where losses are weighted sums; in all or none.
    ``cost``: see ``costs`` of ``step``; in all or none."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    target: Any = None
    weight: Tensor | float | None = None
    cost: float | Sequence[float] | None = None


@runtime_checkable
class StepSource(Protocol):
    """Source that deals each step's samples once it gets the numbers of microbatches."""

    def draw_step(self, shares: Sequence[int]) -> tuple[Sequence[Any], Sequence[float]]:
        """Draw this replica's microbatches of the next step, and their costs. ``shares``: numbers
        of all replicas."""


MicrobatchSource = Iterator[Any] | Callable[[int], Any] | StepSource
"""Source of ``step``. An iterator yields the microbatches of this replica, one after another. A
function gets the number of a microbatch in the whole run. ``BalancedBatchSampler.make_source``
makes the third kind. Each microbatch is a :class:`Microbatch`, or a pair of the input (a tuple:
several arguments) and the target."""


class MicrobatchPosition:
    """Position of a run in its microbatches; saved in checkpoints. Equal on all ranks.

    ``total``: number of microbatches that all replicas have drawn. ``drawn``: by replica.
    """

    def __init__(self, replicas: int) -> None:
        self.total, self.drawn = 0, [0] * replicas

    def find_first_number(self, plan: RankPlan, replica: int) -> int:
        """Find the number of a replica's first microbatch of the next iteration under ``plan``."""
        return self.total + sum(self.list_shares(plan)[:replica])

    def list_shares(self, plan: RankPlan) -> Sequence[int]:
        """List the numbers of microbatches of all replicas under ``plan``."""
        return plan.shares or [plan.microbatches] * len(self.drawn)

    def advance(self, plan: RankPlan) -> None:
        """Advance by the microbatches of an iteration under ``plan``."""
        shares = self.list_shares(plan)
        self.drawn = [mine + share for mine, share in zip(self.drawn, shares, strict=True)]
        self.total += sum(shares)

    def resume_at(self, iteration: int, microbatches: int) -> None:
        """Set the position to ``iteration``, if all replicas have had ``microbatches``."""
        self.drawn = [iteration * microbatches for _ in self.drawn]
        self.total = sum(self.drawn)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"total": self.total, "drawn": list(self.drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint. With another number of replicas, each begins to count
        anew, since the streams of the replicas are others."""
        self.total = state["total"]
        same = len(state["drawn"]) == len(self.drawn)
        self.drawn = list(state["drawn"]) if same else [0] * len(self.drawn)


def check_source(source: Any, given: StepArguments) -> None:
    """Raise :class:`InputError` if ``source`` is none, or if a batch was passed besides."""
    if not isinstance(source, (Iterator, StepSource)) and not callable(source):
        raise InputError(
            f"microbatches is a {type(source).__name__}; expected an iterator, such as"
            " iter(loader), a function of the number of a microbatch, or the source that"
            " BalancedBatchSampler.make_source(loader) returns"
        )
    if given != StepArguments():
        raise InputError("step() got microbatches=, and a batch or weight besides; give one")


def draw_microbatches(
    source: MicrobatchSource, shares: Sequence[int], replica: int, first: int
) -> StepArguments:
    """Draw the microbatches of ``replica``. ``shares``: numbers of microbatches of all replicas.
    ``first``: the number of its first one. Raises :class:`ShapeError` if the source ends before,
    and :class:`InputError` if it yields something else."""
    count, drawn = shares[replica], list[Any]()
    dealt: Sequence[float | None] = [None] * count
    if isinstance(source, StepSource):
        each_drawn, dealt = source.draw_step(shares)
        drawn += each_drawn
    elif isinstance(source, Iterator):
        drawn += islice(source, count)
    else:
        drawn += map(source, range(first, first + count))
    if len(drawn) != count:
        raise ShapeError(
            f"the iterator of microbatches ended after {len(drawn)} of {count}; drop the last,"
            " incomplete ones, or begin the next epoch in the iterator"
        )
    found = [_read_microbatch(each) for each in drawn]
    weights = [each.weight for each in found]
    costs = [
        cost if each.cost is None else each.cost for each, cost in zip(found, dealt, strict=True)
    ]
    for name, values in (("weight", weights), ("cost", costs)):
        if 0 < sum(value is None for value in values) < count:
            raise InputError(
                f"some microbatches have a {name} and others none; give all one, or none"
            )
    return StepArguments(
        arg_mbs=[each.args for each in found] if any(each.args for each in found) else None,
        kwarg_mbs=[dict(e.kwargs) for e in found] if any(e.kwargs for e in found) else None,
        target_mbs=[each.target for each in found]
        if any(each.target is not None for each in found)
        else None,
        weight=sum(map(_sum_weight, weights)) if weights[0] is not None else None,
        costs=costs if costs[0] is not None else None,
        count=count,
    )


def _read_microbatch(drawn: Any) -> Microbatch:
    if isinstance(drawn, Microbatch):
        return drawn
    if isinstance(drawn, (tuple, list)) and len(drawn) == 2:
        args, target = drawn
        return Microbatch(tuple(args) if isinstance(args, (tuple, list)) else (args,), {}, target)
    raise InputError(
        f"the source of microbatches yields a {type(drawn).__name__}; expected a"
        " pipemorph_trainer.Microbatch, or a pair of input and target"
    )


def _sum_weight(weight: Tensor | float | None) -> float:
    assert weight is not None
    return float(weight.sum()) if isinstance(weight, Tensor) else float(weight)


# --- where replicas may have different numbers of microbatches ---------------------------------


def explain_no_rebalance(
    coordinate: Coordinate, stages: Sequence[Any], tensors: Sequence[TensorDescription]
) -> str:
    """Explain why replicas of these stages must have equal numbers of microbatches; empty if they
    need not. ``tensors``: those of the modules among ``stages``."""
    mesh = coordinate.mesh
    if mesh.replicas == 1:
        return "the job has one replica (parallelism.replicas)"
    if mesh.shard > 1:
        return (
            f"shard is {mesh.shard}: ranks that share parameters by fully_shard gather and reduce"
            " them together, and would wait for each other"
        )
    for tensor in tensors:
        if "dp_replicate" in tensor.placement.spanned:
            return (
                f"{tensor.kind} {tensor.name!r} is distributed over replicas, as experts are:"
                " their ops wait for each other in every microbatch"
            )
    for stage in stages:
        if isinstance(stage, ExternalStage):
            return "the stage is run by torch's schedule, which splits whole batches"
        for name, module in stage.named_modules() if isinstance(stage, nn.Module) else ():
            if isinstance(module, nn.SyncBatchNorm):
                return (
                    f"module {name!r} is a SyncBatchNorm, whose replicas wait for each other in"
                    " every microbatch"
                )
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                return (
                    f"module {name!r} has running statistics of a batch norm, which would be those"
                    " of other numbers of microbatches"
                )
    return ""
