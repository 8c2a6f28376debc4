"""Tied weights: a parameter that several stages hold, such as an embedding that is also the output
layer.

Each holder has a copy, which begins with the values of the first holder. At the end of an iteration
their gradients, each the mean over the replicas, are summed in a collective over the ranks that
hold the weight. Equal optimizers then keep the copies equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import BeforeValidator, PlainSerializer
from torch import Tensor, nn

from pipemorph.errors import InputError
from pipemorph_trainer.backward.gradient_form import describe_grad_dtype, make_zero_grad
from pipemorph_trainer.sync.gradients import broadcast_tensor
from pipemorph_trainer.sync.reduction import WaitForCollective, finish_collective
from pipemorph_trainer.topology.placement import describe_shard, to_local

if TYPE_CHECKING:
    from pipemorph.spec.mesh import Coordinate
    from pipemorph_trainer.topology.world import World


class Holder(NamedTuple):
    """Holder of a tied weight: the name of a parameter in the module of a stage."""

    name: str
    stage: int

    def __str__(self) -> str:
        return f"{self.name!r} of stage {self.stage}"


Tie = tuple[Holder, ...]
"""Holders of a tied weight. In checkpoints it has the name of the first."""


def _parse_forms(rows: Any) -> Any:
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == 3 for r in rows):
        raise ValueError("expected rows of a tie, a holder and a form")
    return {(tie, holder): form for tie, holder, form in rows}


TiedForms = Annotated[
    Mapping[tuple[int, int], str],
    PlainSerializer(lambda forms: [[*at, form] for at, form in forms.items()]),
    BeforeValidator(_parse_forms),
]
"""Shape, dtypes and distribution of a rank's tied parameters, by numbers of tie and holder."""


def parse_ties(tied: Sequence[Any] | None, stages: int) -> tuple[Tie, ...]:
    """Parse a pipeline's argument ``tied``: a list of ``(name, stage)``, or a list of such lists.

    Negative stages count from the end. Raises :class:`InputError` for anything else.
    """
    groups = list(tied or ())
    if groups and all(_is_holder(item) for item in groups):
        groups = [groups]
    ties = []
    for group in groups:
        if not isinstance(group, Sequence) or not all(map(_is_holder, group)) or len(group) < 2:
            raise InputError(
                f"tied has {group!r}; expected at least two (name, stage), such as "
                "[('embed.weight', 0), ('head.weight', -1)]"
            )
        for name, stage in group:
            if not -stages <= stage < stages:
                raise InputError(
                    f"tied has stage {stage} for {name!r}, expected {-stages} to {stages - 1}"
                )
        ties.append(tuple(Holder(name, stage % stages) for name, stage in group))
    names = [holder for tie in ties for holder in tie]
    if again := next((holder for holder in names if names.count(holder) > 1), None):
        raise InputError(f"tied has {again} twice; name every parameter once")
    return tuple(ties)


def _is_holder(item: Any) -> bool:
    return (
        isinstance(item, (tuple, list))
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], int)
    )


def describe_tied(
    ties: Sequence[Tie], module: nn.Module | None, coordinate: Coordinate
) -> TiedForms:
    """Describe the tied parameters of the stage at ``coordinate``. Raises :class:`InputError` if
    its module lacks one of them, or has two parameters for one weight."""
    parameters: dict[str, nn.Parameter] = {}
    if module is not None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
    found: dict[tuple[int, int], str] = {}
    for number, tie in enumerate(ties):
        mine = [
            (place, holder) for place, holder in enumerate(tie) if holder.stage == coordinate.stage
        ]
        for place, holder in mine:
            parameter = parameters.get(holder.name)
            if parameter is None:
                raise InputError(f"tied has {holder}, which has no such parameter")
            if parameter is not parameters[mine[0][1].name]:
                raise InputError(
                    f"tied has {mine[0][1]} and {holder.name!r}, two parameters of one stage; tie "
                    "them in the module, by assigning one to the other"
                )
            dtype = str(parameter.dtype).removeprefix("torch.")
            frozen = "" if parameter.requires_grad else ", frozen"
            part = describe_shard(parameter, coordinate)
            shape = list(parameter.shape)
            found[number, place] = f"{dtype}{shape}{frozen}{describe_grad_dtype(parameter)}{part}"
    return found


def check_forms(ties: Sequence[Tie], everyone: Iterable[TiedForms]) -> None:
    """Raise :class:`InputError` if the holders of a weight differ in shape, dtypes or distribution
    over ranks: the ranks of a column exchange their parts."""
    first: dict[int, tuple[int, str]] = {}
    for mine in everyone:
        for (number, place), form in mine.items():
            other, wanted = first.setdefault(number, (place, form))
            if form != wanted:
                tie = ties[number]
                raise InputError(
                    f"tied weights differ: {tie[other]} is {wanted}; {tie[place]} is {form}; give "
                    "both the same shape and dtype, and distribute them alike"
                )


class TiedWeights:
    """Tied weights of this rank. Every call is collective over their holders.

    ``modules``: of this rank's stages. ``aliases``: the first holder of each weight, by holders in
    these modules. ``uncounted``: ids of the parameters that another rank or stage counts in a norm.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        modules: Mapping[int, nn.Module],
        world: World,
        wait: WaitForCollective,
    ) -> None:
        """Create all groups. Collective over all ranks."""
        self._wait = wait
        mesh, held = world.coordinate.mesh, world.coordinate.held_stages
        columns = [
            [mesh.find_rank(each, column) for each in range(mesh.stages)]
            for column in range(mesh.columns)
        ]
        mine = columns[world.coordinate.column]
        self.aliases = {holder: tie[0] for tie in ties for holder in tie if holder.stage in held}
        self._shared: list[_SharedWeight] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for tie in ties:
            for column in columns:
                ranks = _list_holding_ranks(tie, column)
                if len(ranks) > 1 and ranks not in groups:
                    groups[ranks] = world.groups.create_group(
                        [*ranks], group_desc="pipemorph tied weights"
                    )
            # A stage that holds the weight under several names has one parameter for them.
            names = {holder.stage: holder.name for holder in reversed(tie) if holder.stage in held}
            if not names or not modules:
                continue
            first = mine[tie[0].stage] == world.coordinate.rank
            # The parameter of the first holder comes first.
            order = sorted(names, key=lambda stage: (stage != tie[0].stage, stage))
            self._shared.append(
                _SharedWeight(
                    [modules[stage].get_parameter(names[stage]) for stage in order],
                    groups.get(_list_holding_ranks(tie, mine)),
                    first=mine[tie[0].stage],
                    is_first=first,
                )
            )
        self.uncounted = {
            id(p) for each in self._shared for p in each.parameters[1 if each.is_first else 0 :]
        }
        self._world = world
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._summed = True
        """True if each ``.grad`` is already the sum, of an earlier step or a checkpoint."""

    def copy_first_holder(self) -> None:
        """Copy the values of the first holder to the others."""
        for each in self._shared:
            source = to_local(each.parameters[0])
            if each.group is not None:
                broadcast_tensor(source, each.first, each.group, self._wait)
            with torch.no_grad():
                for other in each.parameters[1:]:
                    to_local(other).copy_(source)

    def begin_iteration(self) -> None:
        """Begin an iteration. An accumulated gradient that is already a sum must count once, so it
        is set aside on all holders except the first."""
        self._aside = []
        for each in self._shared if self._summed else ():
            for parameter in each.parameters[1 if each.is_first else 0 :]:
                if parameter.grad is not None:
                    self._aside.append((parameter, parameter.grad))
                    parameter.grad = None

    def undo_iteration(self) -> None:
        """End a refused iteration: put the gradients back."""
        for parameter, grad in self._aside:
            parameter.grad = grad

    def skip_sum(self) -> None:
        """End an iteration without a sum. The next sum includes its gradients."""
        self._summed = self._summed and not self._shared
        self._aside = []

    def sum_gradients(self) -> None:
        """Replace every gradient by the sum over the holders."""
        self._aside = []
        self._summed = True
        for each in self._shared:
            if not each.parameters[0].requires_grad:
                continue
            grad, *others = [_make_grad_dense(parameter) for parameter in each.parameters]
            for other in others:
                grad += other
            if each.group is not None:
                flat = grad if grad.is_contiguous() else grad.contiguous()
                finish_collective(
                    dist.all_reduce(flat, group=each.group, async_op=True), flat, self._wait
                )
                if flat is not grad:
                    grad.copy_(flat)
            for other in others:
                other.copy_(grad)


def _list_holding_ranks(tie: Tie, column: Sequence[int]) -> tuple[int, ...]:
    """List the ranks of a column that hold a weight; ``column``: rank by stage."""
    return tuple(dict.fromkeys(column[stage] for stage in sorted({h.stage for h in tie})))


def _make_grad_dense(parameter: nn.Parameter) -> Tensor:
    """Make a parameter's gradient dense, or zero if there is none; return this rank's part."""
    if parameter.grad is None:
        parameter.grad = make_zero_grad(parameter)
    elif parameter.grad.layout is not torch.strided:
        parameter.grad = parameter.grad.to_dense()
    return to_local(parameter.grad)


class _SharedWeight(NamedTuple):
    """Weight that this rank shares with others, or between its own stages. ``parameters``: of this
    rank, that of the first holder first; ``group``: None if no other rank holds it; ``first``: rank
    of the first holder."""

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None
    first: int
    is_first: bool
