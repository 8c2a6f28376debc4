"""Small jobs that several tests run, and the sequential run they must equal to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gate import same_bits
from torch import Tensor, nn

from pipemorph.planning import Dispatch, Link, Plan, Policy, Problem, Route, StageTimes, plan
from pipemorph.protocol import StageProfile
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient, OffloadStats, RankTelemetry
from pipemorph_trainer.agent.rank_plan import RankPlan, split_plan

WIDTH, VOCABULARY, LENGTH = 8, 11, 3


class Stage(nn.Module):
    """A stage with what real ones have: a nonlinearity, a norm, a residual; and with what is
    awkward between stages: an integer mask, which travels forward only, and a 0-dim output
    that the next stage does not use, whose gradient is None."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.index, self.last = index, index == stages - 1
        if index == 0:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if self.last:
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, mask: Tensor | None = None, unused: Any = None) -> Any:
        if self.index == 0:
            mask = (x % 2).to(torch.int32)
            x = self.embedding(x)
        assert mask is not None
        hidden = torch.tanh(self.up(self.norm(x)))
        x = x + self.down(hidden) * self.scale * (1 + mask.unsqueeze(-1))
        return self.head(x) if self.last else (x, mask, hidden.sum())


def make_stage(index: int, stages: int, dtype: torch.dtype) -> Stage:
    torch.manual_seed(100 + index)
    return Stage(index, stages).to(dtype)


def make_batch(iteration: int, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    tokens = torch.randint(0, VOCABULARY, (batch, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Loader:
    """Batches of ``rows`` that depend on all batches before."""

    def __init__(self, rows: int, width: int) -> None:
        self.seed, self._shape = 1, (rows, width)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.seed = self.seed * 5 % 1009
            yield torch.randn(self._shape, generator=torch.Generator().manual_seed(self.seed))

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]


@dataclass(frozen=True)
class Job:
    """Job that :func:`train` runs on each rank. ``switches`` installs a plan on a rank when it is
    about to run an iteration: ``(iteration, plan, ranks)``."""

    stages: int
    microbatches: int
    policy: str = "pipemorph"
    dispatch: str = "static"
    route: str = "direct"
    engine: str = "auto"
    dtype: torch.dtype = torch.float32
    iterations: int = 3
    batch: int = 2
    faults: Sequence[Fault] = ()
    switches: Sequence[tuple[int, Plan, Sequence[int]]] = ()
    deadline: float = 30.0
    initial: Plan | None = None
    slow_rank: int | None = None
    host_memory: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Job:
        return replace(self, **changes)


def plan_of(
    policy: str,
    stages: int,
    microbatches: int,
    *,
    version: int = 0,
    delay: float = 0.0,
    routes: Sequence[Route] | None = None,
    dispatch: str = "static",
    warmup: Sequence[int] | None = None,
    ranks: int | None = None,
    placement: Any = "interleaved",
    **limits: int | None,
) -> Plan:
    """``delay`` on link 0, in op times. ``limits``: of each stage, see :class:`StageTimes`."""
    one = StageTimes(forward=1, backward_input=1, backward_weight=1, **limits)
    problem = Problem(
        microbatches=microbatches,
        stages=(one,) * stages,
        links=tuple(Link(delay=0 if i else delay) for i in range(stages - 1)),
        policy=Policy(policy),
        warmup=tuple(warmup) if warmup is not None else None,
        ranks=ranks,
        placement=placement,
    )
    return plan(problem).to_plan(
        version, routes or (Route.DIRECT,) * (stages - 1), Dispatch(dispatch)
    )


def plan_with_shares(*shares: int, stages: int = 2, version: int = 0) -> Plan:
    """Plan that gives replicas unequal numbers of microbatches."""
    each = sum(shares) // len(shares)
    return replace(
        plan_of("pipemorph", stages, each, version=version),
        shares=shares,
        resized=tuple(
            plan_of("pipemorph", stages, n, version=version) for n in sorted({*shares} - {each})
        ),
    )


def make_plan(
    job: Job, version: int, policy: str, *, device_limit: int | None = None, **options: Any
) -> Plan:
    """A plan of the job. What exceeds the limit goes to host memory in no time."""
    limits = {"device_limit": device_limit, "offload_copy": 0}
    return plan_of(policy, job.stages, job.microbatches, version=version, **limits, **options)


def part(plan: Plan, rank: int, mesh: MeshShape) -> RankPlan:
    """Part of a plan that one rank of a mesh runs."""
    at = mesh.find_coordinate(rank)
    return split_plan(plan, mesh, [at.index_along("pp")])[0]


@dataclass
class Record:
    """Losses, gradients per iteration, final parameters and plans run, of one rank."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    plans: list[RankPlan] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    split: str = ""
    profiles: list[StageProfile] = field(default_factory=list)
    offloaded: list[OffloadStats | None] = field(default_factory=list)
    """Statistics per iteration."""
    moved: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    """Microbatches per iteration that went to host memory, and whose forward ran again."""
    threads: list[str] = field(default_factory=list)


class RecordingClient(NullControlClient):
    """Records a rank's telemetry of its iterations."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def publish(self, telemetry: RankTelemetry) -> None:
        if telemetry.profile is not None:
            self._record.profiles.append(telemetry.profile)
            self._record.offloaded.append(telemetry.offloaded)


def train(context: TrainerContext, job: Job) -> Record:
    """A training loop as a user writes it, with everything recorded."""
    coordinate = context.coordinate(job.stages)
    stage = coordinate.stage
    module = make_stage(stage, job.stages, job.dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    record = Record()
    client = RecordingClient(record)
    with Pipeline(
        module,
        context=context,
        loss_fn=loss_fn,
        microbatches=job.microbatches,
        stages=job.stages,
        policy=job.policy,
        options=Options(
            dispatch=job.dispatch,
            route=job.route,  # type: ignore[arg-type]
            engine=job.engine,  # type: ignore[arg-type]
            faults=job.faults,
            host_memory=job.host_memory,
            control=client,
        ),
        plan=job.initial,
        deadline_seconds=job.deadline,
        **job.extra,
    ) as pipe:
        replica = coordinate.replica
        for iteration in range(job.iterations):
            for at, plan_, ranks in job.switches:
                if at == iteration and context.rank in ranks:
                    pipe.install_plan(plan_)
            tokens, target = make_batch(1000 * replica + iteration, job.batch * job.microbatches)
            began = time.monotonic()
            loss = pipe.step(tokens, target=target)
            record.seconds.append(time.monotonic() - began)
            record.losses.append(loss)
            record.versions.append(pipe.plan.version)
            record.plans.append(pipe.plan)
            record.grads.append(
                {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            )
            optimizer.step()
            optimizer.zero_grad()
        record.split = pipe.split
    record.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    return record


def reference(
    job: Job, replica: int = 0, batch_of: Callable[[int], int] | None = None
) -> list[Record]:
    """Train in one process: microbatches one after another, no pipeline.

    ``batch_of(iteration)``: samples per microbatch, where they change.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    modules = [make_stage(i, job.stages, job.dtype) for i in range(job.stages)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    records = [Record() for _ in modules]
    for iteration in range(job.iterations):
        batch = job.batch if batch_of is None else batch_of(iteration)
        tokens, target = make_batch(1000 * replica + iteration, batch * job.microbatches)
        total = 0.0
        for x, y in zip(
            tokens.chunk(job.microbatches), target.chunk(job.microbatches), strict=True
        ):
            value: Any = modules[0](x)
            for module in modules[1:]:
                value = module(*value)
            loss = loss_fn(value, y)
            total += float(loss.detach())
            (loss / job.microbatches).backward()
        for record, module, optimizer in zip(records, modules, optimizers, strict=True):
            record.losses.append(torch.tensor(total / job.microbatches, dtype=torch.float32))
            record.grads.append(
                {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            )
            optimizer.step()
            optimizer.zero_grad()
    for record, module in zip(records, modules, strict=True):
        record.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    torch.set_num_threads(threads)
    return records


def assert_same(found: Sequence[Record], expected: Sequence[Record]) -> None:
    """Losses, every gradient of every iteration and the parameters are equal to the bit."""
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for index, (a, b) in enumerate(zip(mine.losses, theirs.losses, strict=True)):
            same_bits(a, b, f"rank {rank}: loss of iteration {index}")
        for index, (a, b) in enumerate(zip(mine.grads, theirs.grads, strict=True)):
            assert a.keys() == b.keys(), f"rank {rank}, iteration {index}: other gradients"
            for name in a:
                where = f"rank {rank}: gradient of {name} in iteration {index}"
                same_bits(a[name], b[name], where)
        for name, value in mine.parameters.items():
            same_bits(value, theirs.parameters[name], f"rank {rank}: {name}")
