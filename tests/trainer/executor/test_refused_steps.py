"""A batch that does not fit ends the step and not the job: on every rank, whichever got it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from gate import same_bits
from launch import Ranks, run_ranks
from pairwise import give_tiers
from torch import Tensor, nn
from trainer_jobs import loss_fn, make_batch, make_stage

from pipemorph.errors import InputError
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.errors import BatchError, PipelineError, ShapeError
from pipemorph_trainer.executor.step_abort import is_batch_error
from pipemorph_trainer.schedule.rank_preparation import check_loss
from pipemorph_trainer.topology import hierarchy

N = 4
WIDTH = 3
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a step."""


MISFITS: dict[str, Callable[[Tensor, Tensor], Call]] = {
    "uneven": lambda tokens, target: ((tokens[:-1],), {"target": target[:-1]}),
    "uneven target": lambda tokens, target: ((tokens,), {"target": target[:-1]}),
    "no input": lambda tokens, target: ((), {"target": target}),
    "no target": lambda tokens, target: ((tokens,), {}),
    "uneven keyword": lambda tokens, target: (
        (tokens,),
        {"target": target, "unused": torch.ones(N + 1)},
    ),
    "unknown keyword": lambda tokens, target: (
        (tokens,),
        {"target": target, "bogus": torch.ones(N)},
    ),
    "negative cost": lambda tokens, target: (
        (tokens,),
        {"target": target, "costs": [1, 1, -2, 1]},
    ),
    "missing cost": lambda tokens, target: ((tokens,), {"target": target, "costs": [1] * 3}),
    "other dtypes": lambda tokens, target: ((tokens.float(),), {"target": target.float()}),
}


class Bad(NamedTuple):
    """A step in which some ranks are given what does not fit, and the error of all."""

    ranks: Sequence[int]
    what: str
    error: str


Step = Bad | None
"""Step; None: all ranks are given what fits."""


class Outcomes(NamedTuple):
    losses: list[Tensor]
    grads: list[dict[str, Tensor]]
    errors: list[str]


def train(context: TrainerContext, stages: int, steps: Sequence[Step], arguments: Any) -> Outcomes:
    """Several calls of ``step`` that add up gradients, and their results."""
    several = {
        name: arguments[name] for name in ("stages_per_rank", "placement") if name in arguments
    }
    coordinate = context.coordinate(stages, *several.values())
    modules = {stage: make_stage(stage, stages, torch.float32) for stage in coordinate.held_stages}
    results = Outcomes([], [], [])
    with Pipeline(
        [*modules.values()], context=context, loss_fn=loss_fn, microbatches=N, stages=stages,
        deadline_seconds=30.0, **arguments,
    ) as pipe:  # fmt: skip
        for step in steps:
            tokens, target = make_batch(10 * coordinate.replica + len(results.losses), 2 * N)
            args, kwargs = (tokens,), {"target": target}
            if step is not None and context.rank in step.ranks:
                args, kwargs = MISFITS[step.what](tokens, target)
            try:
                results.losses.append(pipe.step(*args, **kwargs))
            except BatchError as error:
                results.errors.append(str(error))
            assert pipe.iteration == len(results.losses)
            results.grads.append(
                {
                    f"{stage}.{name}": p.grad.clone()
                    for stage, module in modules.items()
                    for name, p in module.named_parameters()
                    if p.grad is not None
                }
            )
    return results


def entry(
    context: TrainerContext, stages: int, steps: Sequence[Step], arguments: Any, widest: int
) -> list[str]:
    """Run steps and compare their errors. The other steps have to the bit the results they have
    alone, and a refused one changes no gradient."""
    hierarchy.WIDEST = widest
    found = train(context, stages, steps, arguments)
    wanted = train(context, stages, [step for step in steps if step is None], arguments)
    for iteration, (mine, theirs) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        same_bits(mine, theirs, f"loss of iteration {iteration}")
    before: dict[str, Tensor] = {}
    ran = iter(wanted.grads)
    for number, (step, grads) in enumerate(zip(steps, found.grads, strict=True)):
        before = next(ran) if step is None else before
        assert grads.keys() == before.keys(), number
        for name, value in grads.items():
            same_bits(value, before[name], f"gradient of {name} after call {number}")
    return found.errors


def check(
    world: int, stages: int, steps: Sequence[Step], widest: int = hierarchy.WIDEST, **arguments: Any
) -> None:
    wanted = [step.error for step in steps if step is not None]
    for rank, errors in enumerate(run_ranks(world, entry, stages, steps, arguments, widest)):
        assert len(errors) == len(wanted), (rank, errors)
        for text, words in zip(errors, wanted, strict=True):
            assert words in text, (rank, text)
            assert "\n" not in text
            assert text.startswith("step() of iteration "), text


ONE_REPLICA = (
    Bad((0, 1, 2), "uneven", "rank 0 (stage 0): input 0 has shape [7, 3]; expected a first"),
    None,
    None,
    Bad((0,), "uneven", "iteration 2 is refused on all ranks: rank 0 (stage 0): input 0 has"),
    Bad((2,), "uneven target", "rank 2 (stage 2): target 0 has shape [7, 3]"),
    Bad(
        (2,), "no target", "rank 2 (stage 2): step() got no target; loss_fn on this stage needs it"
    ),
    Bad((0,), "no input", "rank 0 (stage 0): step() got no input; stage 0 needs the batch"),
    None,
    Bad((0,), "negative cost", "rank 0 (stage 0): costs[2] is -2; expected a number from 0"),
    Bad((2,), "missing cost", "rank 2 (stage 2): costs has 3 numbers; expected 4, one per"),
    Bad((1,), "uneven keyword", "rank 1 (stage 1): input 'unused' has shape [5]"),
    Bad((0,), "other dtypes", "rank 0 (stage 0): the stage raised RuntimeError"),
    None,
    None,
    Bad((2,), "other dtypes", "rank 2 (stage 2): the stage raised RuntimeError"),
    Bad((1,), "unknown keyword", "rank 1 (stage 1): the stage raised TypeError"),
    None,
)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            {"policy": "1f1b", "options": Options(route="direct")}, marks=pytest.mark.full
        ),
        pytest.param(
            {"policy": "pipemorph", "options": Options(route="delegated", dispatch="guided")},
            marks=pytest.mark.needs_engine,
        ),
    ],
    ids=["direct", "delegated"],
)
def test_the_next_step_goes_on_on_every_rank(arguments: dict[str, Any]) -> None:
    check(3, 3, ONE_REPLICA, **arguments)


@pytest.mark.parametrize("dispatch", give_tiers([("guided",), ("static",)], test=1, full=1))
def test_ranks_with_several_stages(dispatch: str) -> None:
    """Ops run as messages come, and the rest of a refused step runs in the plan's order."""
    steps = (
        Bad((0,), "uneven", "rank 0 (stages 0 and 2): input 0 has shape [7, 3]"),
        None,
        Bad((1,), "uneven target", "rank 1 (stages 1 and 3): target 0 has shape [7, 3]"),
        None,
        Bad((1,), "other dtypes", "rank 1 (stages 1 and 3): the stage raised RuntimeError"),
        Bad((0,), "other dtypes", "rank 0 (stages 0 and 2): the stage raised RuntimeError"),
        Bad((1,), "unknown keyword", "the stage raised TypeError"),
        None,
    )
    several = {"stages_per_rank": 2, "placement": "interleaved"}
    check(2, 4, steps, options=Options(route="direct", dispatch=dispatch), **several)


@pytest.mark.parametrize("widest", [pytest.param(hierarchy.WIDEST, marks=pytest.mark.full), 2])
def test_a_replica_refuses_for_all(widest: int) -> None:
    steps = (
        Bad((1,), "uneven", "rank 1 (stage 0, replica 1): input 0 has shape [7, 3]"),
        None,
        Bad((3,), "uneven target", "rank 3 (stage 1, replica 1): target 0 has shape [7, 3]"),
        Bad((3,), "other dtypes", "rank 3 (stage 1, replica 1): the stage raised RuntimeError"),
        None,
        Bad((0, 1), "uneven", "rank 0 (stage 0, replica 0): input 0 has shape [7, 3]"),
        None,
    )
    # All forwards first: the loss is on its way before the first backward.
    check(4, 2, steps, widest, policy="gpipe", options=Options(route="direct"))


def caused(by: Exception) -> Exception:
    error = RuntimeError("the tokenizer failed")
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "refuses"),
    [
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
        (IndexError("index out of range in self"), True),
        (caused(KeyError("token")), True),
        (ShapeError("other shapes"), True),
        (MemoryError(), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (TimeoutError("the read timed out"), False),
        (ConnectionResetError("reset by peer"), False),
        (EOFError(), False),
        (dist.DistBackendError("NCCL error"), False),
        (caused(OSError(errno.ESTALE, "Stale file handle")), False),
        (PipelineError("a peer is lost"), False),
    ],
    ids=repr,
)  # fmt: skip
def test_an_error_of_the_machine_refuses_no_batch(error: Exception, refuses: bool) -> None:
    """The machine's error may not come after another start. One that the batch has caused would."""
    assert is_batch_error(error) is refuses


class Short(nn.Module):
    """Has no memory in the first forward of its second step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == N + 1:
            raise MemoryError("no memory")
        return cast(Tensor, self.linear(x))


def without_memory(context: TrainerContext) -> None:
    module = Short() if context.rank == 1 else nn.Linear(WIDTH, WIDTH)
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N,
        deadline_seconds=20.0,
    ) as pipe:  # fmt: skip
        for _ in range(2):
            pipe.step(torch.ones(N, WIDTH), target=torch.ones(N, WIDTH))


def test_the_rank_without_memory_raises_that_and_is_named_by_the_others() -> None:
    first, second, third = Ranks(3, without_memory).wait()
    assert second.error.strip().splitlines()[-1] == "MemoryError: no memory"
    for result in (first, third):
        last = result.error.strip().splitlines()[-1]
        assert "PeerLostError: " in last and "rank 1" in last, last
    assert not issubclass(BatchError, InputError), "scripts end with 2 for those: no restart"


def grown(context: TrainerContext) -> str:
    """A layer is added where replicas would not average its gradient."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    x = torch.ones(N, 6)
    with Pipeline(
        module, context=context, loss_fn=torch.nn.functional.mse_loss, microbatches=N, stages=1
    ) as pipe:
        module[1].weight = module[0].weight  # tied: nothing is new
        module[0].requires_grad_(False)
        pipe.step(x, target=x)
        module.append(torch.nn.Linear(6, 6))
        with pytest.raises(BatchError) as raised:
            pipe.step(x, target=x)
        pipe.evaluate(x, target=x)
    return str(raised.value)


def test_replicas_refuse_parameters_that_they_would_not_average() -> None:
    for error in run_ranks(2, grown):
        assert "the parameter '2.weight' was added to the stage or replaced" in error


class Learned(torch.nn.Module):
    """A loss with a learned temperature."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.heat = torch.nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() / self.heat


def scaled(output: Tensor, target: Tensor, scale: Any = 1) -> Tensor:
    return ((output - target) * scale).square().mean()


OWN = torch.nn.Linear(2, 2)
HEAT = torch.nn.Parameter(torch.ones(()))


def closing_over(value: Any) -> Callable[..., Tensor]:
    return lambda output, target: scaled(output, target, value)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (Learned(), "'heat'"),
        (closing_over(HEAT), "'value'"),
        (partial(scaled, scale=HEAT), "'scale'"),
        (partial(Learned()), "'heat'"),
        (Learned(trained=False), None),
        (closing_over(HEAT.detach()), None),
        (closing_over(torch.nn.Linear(2, 2)), "'weight'"),
        (closing_over(torch.nn.Sequential(OWN, torch.nn.Linear(2, 2))), None),
        (partial(scaled, scale=2.0), None),
        (None, None),
    ],
)
def test_parameters_of_the_loss_belong_to_a_stage(loss: Any, named: str | None) -> None:
    if named is not None:
        with pytest.raises(InputError, match=rf"loss_fn trains the parameter {named}, which no"):
            check_loss(loss, {0: OWN})
    else:
        check_loss(loss, {0: OWN})
    if isinstance(loss, Learned):
        check_loss(loss, {0: torch.nn.ModuleList([loss])})
