"""Several stages per rank, run in the order of an interleaved schedule.

There is one executor per stage and one order per rank. The next op of the order waits for its
message, on whichever stage it is. Each kind of op runs in microbatch order on every stage, so
results are bitwise equal to those of a sequential run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemorph.api.mesh import Coordinate, MeshShape
from pipemorph.api.spec import Fault
from pipemorph.errors import InputError
from pipemorph.planning.formats.torch_csv import dump_csv
from pipemorph.planning.simulation.interleaved import InterleavedSchedule, validate_interleaved
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.errors import PipelineError, first_sentence
from pipemorph_trainer.executor.call import Generations
from pipemorph_trainer.executor.call import Start as TokenStart
from pipemorph_trainer.executor.dispatch import Executor, Inputs, Outcome
from pipemorph_trainer.executor.inputs import Given, check_grad_mode, of_stage
from pipemorph_trainer.executor.split import StageRunner
from pipemorph_trainer.executor.split.flight import LossFn
from pipemorph_trainer.executor.timed import TimedOp
from pipemorph_trainer.executor.waiting import Waiting
from pipemorph_trainer.links.channels.arrival import OpClock
from pipemorph_trainer.links.faults import FaultTrace
from pipemorph_trainer.links.interleaved import meet_chunks
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.links.rendezvous import LinkConfig
from pipemorph_trainer.start import Start, digest, join
from pipemorph_trainer.state.weights import check_stage
from pipemorph_trainer.topology.addresses import own_address


class InterleavedPipeline:
    """The stages of this rank, stepped like :class:`pipemorph_trainer.Pipeline`.

    Runs one schedule in static order over torch.distributed (gloo) on the CPU, with one replica. It
    neither adapts nor reports.

    Args:
        stages: this rank's stages by number, as ``schedule`` places them. Stage 0 gets the
            arguments of :meth:`step`, stage *s* the tensors that stage *s-1* returned.
        context: identity of this rank; the job has as many ranks as the schedule.
        schedule: of ``pipemorph.planning.policies.interleaved``, or read from torch's CSV
            (``pipemorph.planning.formats.torch_csv.parse_csv``).
        loss_fn: ``loss_fn(output, target)`` → scalar, on the rank of the last stage, unless
            its module returns the loss itself.
        faults: a fault trace; link *s* joins stages *s* and *s+1*. Not for links within a rank.
        deadline_seconds: longest wait for one message.

    Raises :class:`InputError` if stages, ranks and schedule do not fit.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        context: TrainerContext,
        schedule: InterleavedSchedule,
        loss_fn: LossFn | None = None,
        faults: Sequence[Fault] = (),
        deadline_seconds: float = 300.0,
    ) -> None:
        validate_interleaved(schedule)
        self.schedule = schedule
        placement = schedule.placement()
        _check_faults(faults, placement)
        self._check(stages, context, placement)
        self._per_stage = schedule.per_stage()
        self._order = schedule.ranks[context.rank]
        self._last = len(placement) - 1
        self._rank = context.rank
        start = Start(
            mesh=MeshShape(len(schedule.ranks)),
            microbatches=schedule.microbatches,
            plan=digest(dump_csv(schedule)),
        )
        self._world, _ = join(context, torch.device("cpu"), start)
        self._waiting = Waiting(f"rank {context.rank}")
        self._poller = Poller()
        self._forgotten: set[int] = set()
        op_clock = OpClock()
        config = LinkConfig(
            secret=self._world.secret,
            faults=FaultTrace(faults),
            device=torch.device("cpu"),
            deadline=deadline_seconds,
            poller=self._poller,
            op_clock=op_clock,
            begin_wait=self._waiting.begin,
            end_wait=self._waiting.end,
            # The stages of a rank take turns: a bound on the sends of one could block another,
            # and the ranks would wait for each other.
            max_sends=schedule.microbatches,
        )
        address = own_address(context.master_addr)
        self._links = meet_chunks(
            placement, context.rank, config, address=address, groups=self._world.groups
        )
        self._coordinates = {
            stage: Coordinate(context.rank, MeshShape(len(placement)), stage)
            for stage in sorted(stages)
        }
        self._runners: dict[int, StageRunner] = {}
        self._executors: dict[int, Executor] = {}
        for stage, coordinate in self._coordinates.items():
            runner = StageRunner(
                stages[stage],
                is_first=coordinate.first,
                is_last=coordinate.last,
                loss_fn=loss_fn if coordinate.last else None,
                microbatches=schedule.microbatches,
            )
            self._runners[stage] = runner
            self._executors[stage] = Executor(
                coordinate=coordinate,
                runner=runner,
                neighbours=self._links.neighbours[stage],
                poller=self._poller,
                op_clock=op_clock,
                waiting=self._waiting,
                deadline=deadline_seconds,
                boundary=self._between_ops,
                on_last_forward=lambda _: None,
                reserve=lambda *_: None,
            )
        self._deadline = deadline_seconds
        self._needs_target = loss_fn is not None
        self._shapes: Any = None
        self._generation = 0
        self._closed = False
        self._training_began = 0.0
        self.iteration = 0
        self.ops: list[tuple[int, TimedOp]] = []
        """``(stage, op)`` of the last iteration, in the order run."""

    @staticmethod
    def _check(
        stages: Mapping[int, nn.Module], context: TrainerContext, placement: tuple[int, ...]
    ) -> None:
        ranks = max(placement) + 1
        if context.world_size != ranks:
            raise InputError(f"the schedule has {ranks} ranks; this job runs {context.world_size}")
        mine = [stage for stage, rank in enumerate(placement) if rank == context.rank]
        if sorted(stages) != mine:
            raise InputError(
                f"rank {context.rank} was given stages {sorted(stages)}; the schedule puts"
                f" {mine} on it"
            )
        for stage, module in stages.items():
            check_stage(module)
            for parameter in module.parameters():
                if parameter.device.type != "cpu":
                    raise InputError(
                        f"stage {stage} is on {parameter.device}; several stages per rank run on"
                        " the CPU only"
                    )

    @property
    def splits(self) -> dict[int, str]:
        """How each stage of this rank splits its backward. Final after the first step."""
        return {stage: runner.split for stage, runner in self._runners.items()}

    def step(self, *args: Any, target: Any = None) -> Tensor:
        """Run one iteration: forward and backward of all microbatches on all stages.

        Call it on every rank. The rank of stage 0 uses ``args``, the rank of the last stage
        ``target``; both are split into N microbatches along dimension 0.

        Returns the loss on **every** rank: the mean over microbatches, 0-dim float32. Gradients are
        added to ``.grad``. Raises :class:`PipelineError` if a message does not arrive.
        """
        if self._closed:
            raise PipelineError(f"rank {self._rank}: step() after close()")
        check_grad_mode(f"rank {self._rank}")
        try:
            return self._step(args, target)
        except BaseException:
            self._release(goodbye=False)
            raise

    def _step(self, args: tuple[Any, ...], target: Any) -> Tensor:
        inputs: dict[int, Inputs] = {}
        shapes: list[Any] = []
        for stage, coordinate in self._coordinates.items():
            inputs[stage], found = of_stage(
                coordinate, self.schedule.microbatches, Given(args, target=target),
                needs_target=self._needs_target,
            )  # fmt: skip
            shapes += [found, self._runners[stage].trained]
        changed = self._shapes_changed(shapes)
        self._generation += changed
        generations = Generations(self._generation, self._generation)
        start = TokenStart(shapes_from_above=changed, shapes_to_below=changed)
        outcomes: dict[int, Outcome] = {}

        def begin(stage: int) -> None:
            outcomes[stage] = self._executors[stage].begin(
                self._per_stage, self.iteration, generations, inputs[stage], start
            )

        for executor in self._executors.values():
            # The first messages follow the first F and B of every stage, which compile, tune or
            # load.
            executor.allow(self._deadline * (self._last + 1 if self.iteration == 0 else 1))
        self._training_began = self._training_began or time()
        for end in self._links.ends:
            end.faults.begin(self.iteration, self._training_began)
        if not changed:
            for stage in self._executors:
                begin(stage)
        self.ops = []
        for stage, kind, microbatch in self._order:
            if stage not in outcomes:
                # Its shapes arrive only with its first microbatch.
                begin(stage)
            self._executors[stage].run_op(kind, microbatch)
            self.ops.append((stage, outcomes[stage].ops[-1]))
        if self.iteration == 0:
            self._waiting.begin("its own split-backward self-tests")
            for runner in self._runners.values():
                runner.self_test()
            self._waiting.end()
        self.iteration += 1
        return self._share_loss(outcomes.get(self._last))

    def close(self) -> None:
        """End the connections to the neighbours. Idempotent."""
        self._release(goodbye=True)

    def __enter__(self) -> InterleavedPipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release(goodbye=error is None)

    # --- one iteration --------------------------------------------------------------------

    def _shapes_changed(self, shapes: Any) -> bool:
        """Whether a stage's inputs differ in shape from the last iteration's; the same on all
        ranks."""
        changed = torch.tensor([float(self.iteration == 0 or shapes != self._shapes)])
        self._shapes = shapes
        self._collective(changed, dist.ReduceOp.MAX, f"all ranks to begin {self.iteration}")
        return bool(changed)

    def _share_loss(self, outcome: Outcome | None) -> Tensor:
        total = torch.zeros(1, dtype=torch.float64)
        for loss in outcome.losses if outcome is not None else ():
            total += float(loss)
        total /= self.schedule.microbatches
        what = f"the loss of iteration {self.iteration - 1}"
        self._collective(total, dist.ReduceOp.SUM, what)
        return total[0].to(torch.float32)

    def _collective(self, value: Tensor, how: Any, what: str) -> None:
        self._waiting.begin(what)
        try:
            dist.all_reduce(value, op=how, group=self._world.control)
        except RuntimeError as error:
            raise PipelineError(f"{self._waiting.describe()}: {first_sentence(error)}") from error
        self._waiting.end()

    def _between_ops(self) -> None:
        """Read every control socket: unread data would wake up all waits of other stages."""
        for end in self._links.ends:
            end.socket.pump()
            if end.socket.lost is not None and end.link not in self._forgotten:
                self._forgotten.add(end.link)
                self._poller.forget(end.socket.fileno())

    def _release(self, *, goodbye: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._links.close(goodbye=goodbye)
        self._world.leave(clean=goodbye)


def _check_faults(faults: Sequence[Fault], placement: Sequence[int]) -> None:
    for i, fault in enumerate(faults):
        if fault.link is None or fault.link >= len(placement) - 1:
            raise InputError(
                f"faults[{i}].link is {fault.link}; {len(placement)} stages have links 0 to"
                f" {len(placement) - 2}"
            )
        if placement[fault.link] == placement[fault.link + 1]:
            raise InputError(
                f"faults[{i}].link is {fault.link}, which is within rank {placement[fault.link]}"
            )
        if fault.sever is not None:
            raise InputError(f"faults[{i}] cuts an engine connection; these links have none")
