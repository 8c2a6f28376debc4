"""The trainer's public face: a pipeline that is stepped like torch's own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path as FilePath
from time import monotonic, time
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemorph.control.initial import initial_plan
from pipemorph.errors import InputError, PipeMorphError
from pipemorph.planning import (
    Dispatch,
    Link,
    Path,
    Plan,
    Policy,
    Problem,
    StageTimes,
)
from pipemorph.planning import (
    plan as plan_schedule,
)
from pipemorph.spec import Checkpoint, Fault
from pipemorph.wire import IterationSample
from pipemorph_trainer.accelerator import accelerator_of
from pipemorph_trainer.agent import AgentHandle, connect, start_agent
from pipemorph_trainer.checkpoint import Checkpoints
from pipemorph_trainer.commit import PlanBook, RankRow, Round, agree, bubble_fraction
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.control import ControlClient, NoControl
from pipemorph_trainer.emulated import EmulatedRunner, EmulatedStage
from pipemorph_trainer.errors import (
    PipelineError,
    WaitTimeoutError,
    first_sentence,
)
from pipemorph_trainer.executor.bell import Bell
from pipemorph_trainer.executor.device_times import DeviceTimes, LossCopy
from pipemorph_trainer.executor.loop import Executor, Inputs, Outcome
from pipemorph_trainer.executor.waiting import Waiting
from pipemorph_trainer.gradients import average_over_replicas, clip_global_norm
from pipemorph_trainer.inputs import signature, split
from pipemorph_trainer.links import EngineOptions, LinkEnd, engine_module, meet
from pipemorph_trainer.metrics import metered
from pipemorph_trainer.offload import ActivationStore
from pipemorph_trainer.paths.arrival import OpClock
from pipemorph_trainer.paths.line import StepToken
from pipemorph_trainer.paths.message import Batch, Direction, TensorMeta
from pipemorph_trainer.profile import (
    Footprint,
    PeakMemory,
    footprint,
    offloaded,
    stage_profile,
)
from pipemorph_trainer.signals import LastWord
from pipemorph_trainer.split import StageRunner
from pipemorph_trainer.stage import Runner
from pipemorph_trainer.telemetry import Reporter
from pipemorph_trainer.trace import TraceWriter
from pipemorph_trainer.world import join

log = logging.getLogger("pipemorph.trainer")

LossFn = Callable[[Any, Any], Tensor]
PathChoice = Literal["auto", "direct", "delegated"]

SWITCH_SECONDS = 1e-3
"""How soon a receiver thread gets the interpreter; the default of 5 ms is half an op. Shorter
costs CPU: a thread that waits for the interpreter wakes up this often."""
PLAN_POLL_SECONDS = 0.02
SPARE_SLOTS = 4
"""Engine slots beyond a link's slackness: messages that a delay keeps on their way."""


class Pipeline:
    """One stage of a pipeline, on every rank of it.

    With a job file in the context everything but the stage comes from the job; without one
    (plain torchrun) from the arguments.

    Args:
        stage: any ``nn.Module``, or an :class:`EmulatedStage`. Stage 0 gets the arguments of
            :meth:`step`, stage *i* the tensors stage *i-1* returned.
        context: where this rank runs.
        loss_fn: ``loss_fn(output, target)`` → scalar; needed on the last stage unless its
            module returns the loss itself.
        microbatches: N; the batch given to :meth:`step` is split into N along dimension 0.
        optimizer: only for checkpoints; stepping it stays with the caller.
        checkpoint: where and how often to save, and whether to resume; then
            :attr:`start_iteration` is where to go on.
        host_memory: bytes of host memory on this rank that a plan may use for activations;
            None: a plan that moves some of them there is refused.
        stages: pipeline stages; default: all ranks. RANK = replica × stages + stage.
        policy, dispatch, path: how to schedule and how messages travel. ``path="auto"`` is
            direct until a directive moves a link.
        direct_duplex: ``half`` gives both directions of a direct link one queue, as a pair of
            ranks has in torch.distributed; for comparisons, on gloo.
        plan: run exactly this plan instead of one made from ``policy``.
        faults: a fault trace, applied in the transport (see :class:`pipemorph.spec.Fault`).
        deadline_seconds: longest wait for one message.
        engine: data path of the transfer engine: auto, tcp, shm or rdma.
        control: where plans come from and telemetry goes; default: the job's agent, if any.

    Raises :class:`InputError` if the job and the ranks do not fit, :class:`PipelineError` if
    a neighbour does not come.
    """

    def __init__(
        self,
        stage: nn.Module | EmulatedStage,
        *,
        context: TrainerContext,
        loss_fn: LossFn | None = None,
        microbatches: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        stages: int | None = None,
        policy: Policy | str = Policy.PIPEMORPH,
        dispatch: Dispatch | str = Dispatch.STATIC,
        path: PathChoice = "auto",
        plan: Plan | None = None,
        faults: Sequence[Fault] = (),
        deadline_seconds: float = 300.0,
        engine: Literal["auto", "tcp", "shm", "rdma"] = "auto",
        queues: int = 8,
        direct_duplex: Literal["full", "half"] = "full",
        checkpoint: Checkpoint | None = None,
        host_memory: int | None = None,
        control: ControlClient | None = None,
    ) -> None:
        self.context = context
        spec = context.job.spec if context.job is not None else None
        if spec is not None:
            microbatches = spec.schedule.microbatches
            stages = spec.parallelism.stages
            faults = spec.faults
            deadline_seconds = spec.transport.deadline_seconds
            engine, path = spec.transport.engine, spec.transport.path
            queues, direct_duplex = spec.transport.queues, spec.transport.direct_duplex
            checkpoint = spec.checkpoint
            adaptation = spec.adaptation
            host_memory = adaptation.host_memory if adaptation.allow_offload else None
            torch.set_num_threads(spec.trainer.threads)
        stages = stages if stages is not None else context.world_size
        if plan is None:
            plan = (
                initial_plan(spec)
                if spec is not None
                else _plan_of(stages, microbatches, Policy(policy), Dispatch(dispatch), path)
            )
        self._first_plan = plan
        self._deadline = deadline_seconds
        self._microbatches = plan.schedule.microbatches
        self._module = stage if isinstance(stage, nn.Module) else None
        self.device = _device_of(self._module)
        self._accelerator = accelerator_of(self.device)
        self._device_times: DeviceTimes | None = None
        if self._accelerator is not None:
            # What is allocated without naming a device belongs to the stage's.
            self._accelerator.enter_thread()
            self._device_times = DeviceTimes(self._accelerator)
        self._world = join(context, stages, self.device)
        self.seat = self._world.seat
        self._check_seat(plan, path)
        self._no_offload = ""
        """Why activations of this stage have to stay on the device; empty if they need not."""
        self._store = self._open_store(stage, host_memory)
        self._check_offload(plan)

        self._waiting = Waiting(str(self.seat))
        self._bell = Bell()
        self._op_clock = OpClock()
        self._agent: AgentHandle | None = None
        self._control = control if control is not None else self._join_agent()
        self._control = metered(self._control, context, self.seat, plan)
        self._neighbours = meet(
            self.seat,
            secret=self._world.secret,
            master_addr=context.master_addr,
            faults=faults,
            bell=self._bell,
            op_clock=self._op_clock,
            device=self.device,
            engine_options=self._engine_options(path, engine, queues),
            deadline=deadline_seconds,
            on_block=self._on_block,
            on_unblock=self._waiting.end,
            half_duplex=direct_duplex == "half",
            groups=self._world.groups,
        )
        self._plans = PlanBook(plan, self._reserve_for)
        self._check_paths(plan)
        for end in self._neighbours.ends:
            if end.failover is not None:
                end.failover.on_broken = partial(self._on_broken, end)
        self._runner = self._make_runner(stage, loss_fn)
        rails = self._neighbours.engine.rails if self._neighbours.engine is not None else None
        self._reporter = Reporter(self.seat, self._control, self._neighbours.ends, rails)
        self._executor = Executor(
            seat=self.seat,
            runner=self._runner,
            neighbours=self._neighbours,
            bell=self._bell,
            op_clock=self._op_clock,
            waiting=self._waiting,
            deadline=deadline_seconds,
            boundary=self._between_ops,
            on_first_forward=self._choose_split,
            on_last_forward=self._post_loss,
            reserve=self._reserve_link,
            device_times=self._device_times,
        )
        emulated = isinstance(stage, EmulatedStage)
        self._trace = TraceWriter(context.trace_dir, self.seat, emulated=emulated)
        self._last_word = LastWord(self.current_wait, self._leave_traces)
        self._memory = PeakMemory(self.device)
        self._footprint = _footprint_of(stage)
        self._generation = 0
        self._shapes: Any = None
        self._rounds: dict[int, Round] = {}
        self._agreed = plan.version
        self._began: dict[int, float] = {}
        self._losses: dict[int, float] = {}
        self._epochs: dict[int, int] = {}
        self._loss = torch.zeros(1, dtype=torch.float64)
        self._loss_work: Any = None
        self._loss_copy: LossCopy | None = None
        self._training_began = 0.0
        self._polled_at = 0.0
        self._last_activity = time()
        self._closed = False
        self._failure: str | None = None
        self._switch_interval = sys.getswitchinterval()
        self._ended: dict[int, float] = {}
        self._checkpoint = checkpoint
        self._checkpoints = self._open_checkpoints(checkpoint, optimizer)
        self.start_iteration = self._resume()
        self.iteration = self.start_iteration
        sys.setswitchinterval(SWITCH_SECONDS)
        self._last_word.install()
        resumed = f"resumed from the checkpoint of iteration {self.start_iteration}"
        tell = self.start_iteration > 0 and self.seat.rank == 0
        self._reporter.publish(message=resumed if tell else None)

    # --- what a user calls --------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Run one iteration: forward and backward of all microbatches.

        Call it on every rank. Only stage 0 uses ``args`` (tensors of shape (batch, …), split
        into N microbatches along dimension 0; anything else is given to all of them) and only
        the last stage uses ``target``; others may pass them or nothing. ``kwargs`` are split
        alike and go to **this** rank's stage, whichever it is, as in
        ``torch.distributed.pipelining``: a mask that every stage needs is given on every
        rank instead of being sent along. They get no gradient.

        Returns the loss on **every** rank: the mean over microbatches and replicas, 0-dim
        float32. Gradients are added to ``.grad``, averaged over replicas.

        Raises :class:`PipelineError` naming the message that did not come,
        :class:`ShapeError` if shapes do not fit.
        """
        if self._closed:
            raise PipelineError(f"{self.seat}: step() after close()")
        try:
            return self._step(args, kwargs, target)
        except BaseException as error:
            self._fail(error)
            raise

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients by their 2-norm over **all** stages; call it on every rank.

        Returns the norm before clipping, 0-dim float32, the same on all ranks. Emulated
        stages have no gradients but wait for each other all the same.
        """
        if self._closed:
            raise PipelineError(f"{self.seat}: clip_grad_norm_() after close()")
        parameters = [] if self._module is None else list(self._module.parameters())
        self._waiting.begin(f"the gradient norm of iteration {self.iteration - 1} of all stages")
        try:
            norm = clip_global_norm(parameters, max_norm, self._world.stages, self._wait_for)
        except PipelineError as error:
            self._fail(error)
            raise
        self._waiting.end()
        self._last_activity = time()
        return norm

    def current_wait(self) -> str:
        """What this rank waits for, or what it failed of, in words; callable from any thread."""
        return self._failure or self._waiting.describe()

    @property
    def split(self) -> str:
        """How this stage splits its backward: module, graph, fused or emulated. Known after
        the first step."""
        return self._runner.split

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plans.in_force

    def install(self, plan: Plan) -> None:
        """Prepare a plan here, as one that came in a directive. It runs on all ranks from the
        second iteration after the one at whose end all ranks had prepared it.

        Raises :class:`InputError` if it does not fit this job.
        """
        self._check_paths(plan)
        self._check_offload(plan)
        self._plans.prepare(plan)
        self._reporter.prepared = self._plans.newest

    def close(self) -> None:
        """Finish: wait for all ranks, say goodbye, give everything back. Idempotent."""
        if self._closed:
            return
        try:
            if self.iteration > self.start_iteration:
                self._ended[self.iteration - 1] = self._last_activity
                self._save_if_due()
            for index in sorted(self._rounds):
                self._finish_round(index)
        except BaseException as error:
            self._fail(error)
            raise
        self._closed = True
        self._reporter.state = "finished"
        self._reporter.publish()
        self._release(goodbye=True)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._fail(error)
        else:
            self.close()

    # --- one iteration --------------------------------------------------------------------

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Tensor:
        iteration = self.iteration
        if iteration > self.start_iteration:
            self._ended[iteration - 1] = time()
            self._save_if_due()
        inputs, shapes = self._split_inputs(args, kwargs, target)
        origin = time()
        self._training_began = self._training_began or origin
        self._began[iteration] = origin
        plan = self._begin_iteration(iteration)
        handshake = self._pass_token(iteration, plan.version, shapes)
        self._memory.reset()
        if not self.seat.last:
            self._post_loss([])
        outcome = self._executor.run(plan, iteration, self._generation, inputs, handshake=handshake)
        if self._module is not None and self._world.replicas is not None:
            self._waiting.begin(f"gradients of iteration {iteration} of the other replicas")
            average_over_replicas(self._module.parameters(), self._world.replicas, self._wait_for)
            self._waiting.end()
        if isinstance(self._runner, EmulatedRunner):
            self._runner.update()
        loss = self._wait_loss(iteration)
        self._end_iteration(iteration, plan, origin, outcome, loss)
        return torch.tensor(loss, dtype=torch.float32)

    def _begin_iteration(self, iteration: int) -> Plan:
        """Commit what all ranks agreed on two iterations ago, and select the links' paths."""
        self._finish_round(iteration - 2)
        if self._plans.commit(self._agreed):
            log.info("%s: plan %d from iteration %d on", self.seat, self._agreed, iteration)
        plan = self._plans.in_force
        for end in self._neighbours.ends:
            end.select(plan.paths[end.link])
            end.shaper.begin(iteration, self._training_began)
        self._reporter.state = "training"
        self._reporter.begin_iteration(iteration, plan.version)
        self._executor.at_iteration(iteration)
        self._epochs[iteration] = plan.version
        return plan

    def _pass_token(self, iteration: int, version: int, shapes: Any) -> bool:
        """Start the iteration from stage 0 down; True if shapes are to be exchanged in it."""
        up, down = self._neighbours.upstream, self._neighbours.downstream
        if up is None:
            handshake = bool(shapes != self._shapes)
            self._shapes = shapes
            self._generation += handshake
        else:
            token = self._executor.await_line(up, f"stage {up.peer_stage} to begin", up.line.tokens)
            if token.iteration != iteration or token.version != version:
                raise PipelineError(
                    f"{self.seat} begins iteration {iteration} with plan {version}, stage "
                    f"{up.peer_stage} iteration {token.iteration} with plan {token.version}; "
                    "every rank has to call step() the same number of times"
                )
            handshake = token.generation != self._generation
            self._generation = token.generation
        if down is not None:
            down.line.send_token(StepToken(iteration, version, self._generation))
        return handshake

    def _end_iteration(
        self, iteration: int, plan: Plan, origin: float, outcome: Outcome, loss: float
    ) -> None:
        if self._device_times is not None:
            self._waiting.begin(f"the device to finish iteration {iteration}")
            outcome.ops = self._device_times.settle(outcome.ops)
            outcome.copies = self._device_times.settle_copies(outcome.copies)
            self._waiting.end()
        ops = outcome.ops
        row = RankRow(
            self._plans.versions(),
            ops[0].start,
            ops[-1].end,
            sum(op.end - op.start for op in ops),
        )
        self._rounds[iteration] = Round(iteration, row, self._world.control)
        profile = stage_profile(
            self.seat.stage,
            ops,
            self._runner.split,
            peak_memory=self._memory.read(),
            footprint=self._footprint,
            copies=outcome.copies,
        )
        held = self._store.pool.nbytes if self._store is not None else 0
        self._reporter.publish(profile=profile, offloaded=offloaded(outcome.copies, held))
        self._trace.iteration(iteration, plan.version, origin, outcome)
        self._losses[iteration] = loss
        self.iteration = iteration + 1
        self._last_activity = time()

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any
    ) -> tuple[Inputs, Any]:
        """Microbatches of what this stage uses, and what tells a change of shapes."""
        inputs = Inputs()
        if self._module is None:
            return inputs, ("emulated",)
        shapes: Any = None
        if kwargs:
            inputs.kwargs = split((), kwargs, self._microbatches)[1]
        if self.seat.first:
            if not args and not kwargs:
                raise InputError(f"{self.seat}: step() got no input; stage 0 needs the batch")
            if args:
                inputs.args = split(args, {}, self._microbatches)[0]
            shapes = signature((*inputs.args[:1], *inputs.kwargs[:1]))
        if self.seat.last and target is not None:
            inputs.targets = [
                chunk[0] for chunk in split((target,), {}, self._microbatches, "target")[0]
            ]
        elif self.seat.last and self._needs_target:
            raise InputError(f"{self.seat}: step() got no target; loss_fn on this stage needs it")
        return inputs, shapes

    def _choose_split(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> None:
        """Before the first F: try on one real microbatch how this stage can be split."""
        if not isinstance(self._runner, StageRunner):
            return
        self._waiting.begin("its own split-backward self-test")
        report = self._runner.self_test(args, kwargs, target)
        self._waiting.end()
        self._footprint = footprint(report)
        if report.offload is not None and report.offload.reason:
            self._no_offload = report.offload.reason
            for plan in self._plans.prepared():
                self._check_offload(plan)
        for text in report.lines():
            log.info("%s: %s", self.seat, text)

    # --- loss ------------------------------------------------------------------------------

    def _post_loss(self, losses: list[Tensor]) -> None:
        """Begin to share the loss. The last stage does so after its last F, the others before
        their first op, so that it is here long before it is asked for. Losses of a device are
        shared once they are on the host: what comes after the last F is launched meanwhile."""
        if losses and self._accelerator is not None:
            self._loss_copy = LossCopy(self._accelerator, losses)
        else:
            self._share_loss([float(loss) for loss in losses])

    def _share_loss(self, losses: Sequence[float]) -> None:
        self._loss_copy = None
        total = 0.0
        for loss in losses:
            total += loss
        self._loss = torch.tensor([total / self._microbatches], dtype=torch.float64)
        self._loss_work = dist.all_reduce(self._loss, group=self._world.control, async_op=True)

    def _wait_loss(self, iteration: int) -> float:
        self._waiting.begin(f"the loss of iteration {iteration} from the last stage")
        if self._loss_copy is not None:
            self._share_loss(self._loss_copy.take())
        self._wait_for(self._loss_work)
        self._waiting.end()
        return float(self._loss) / self.seat.replicas

    def _wait_for(self, work: Any) -> None:
        """Wait for a collective on CPU tensors, at most the deadline. Raises
        :class:`PipelineError` naming what is waited for."""
        began = monotonic()
        try:
            work.wait(timedelta(seconds=self._deadline))
        except RuntimeError as error:
            raise self._collective_failed(error, monotonic() - began) from error

    def _collective_failed(self, error: RuntimeError, seconds: float) -> PipelineError:
        if seconds >= self._deadline:
            return WaitTimeoutError(
                f"{self._waiting.describe()}; the deadline is {self._deadline:g} s"
            )
        return PipelineError(
            f"{self._waiting.describe()}; a connection failed: {first_sentence(error)}"
        )

    # --- commit and telemetry ----------------------------------------------------------------

    def _finish_round(self, iteration: int) -> None:
        """Wait for an iteration's collective (long done) and take its agreement."""
        found = self._rounds.pop(iteration, None)
        if found is None:
            return
        self._waiting.begin(f"all ranks to finish iteration {iteration}")
        self._wait_for(found.work)
        rows = found.rows()
        self._waiting.end()
        self._agreed = agree(rows, self._agreed)
        self._report(iteration, rows)

    def _between_ops(self) -> None:
        """Between two ops and during long waits: cheap, and nothing here blocks."""
        now = time()
        if now - self._polled_at < PLAN_POLL_SECONDS:
            return
        self._polled_at = now
        if self._loss_copy is not None and self._loss_copy.done():
            self._share_loss(self._loss_copy.take())
        before = self._rounds.get(self._reporter.iteration - 1)
        if before is not None and before.done():
            self._finish_round(before.iteration)
        plan = self._control.newest_plan()
        if plan is not None:
            try:
                self.install(plan)
            except InputError as error:
                log.warning("%s: plan %d refused: %s", self.seat, plan.version, error)
                self._reporter.publish(message=f"plan {plan.version} refused: {error}")
        for end in self._neighbours.ends:
            end.severer.at(self._reporter.iteration, now - self._training_began)
        self._reporter.between_ops()

    def _report(self, index: int, rows: list[RankRow]) -> None:
        """Rank 0: publish an iteration now that all ranks' times are here.

        It lasted from its step() to the next one, less the time a checkpoint took: the
        optimizer, the gradient norm and the data are part of what a user waits for.
        """
        sample = IterationSample(
            index=index,
            seconds=max(0.0, self._ended.pop(index) - self._began.pop(index)),
            loss=self._losses.pop(index),
            epoch=self._epochs.pop(index),
            bubble_fraction=bubble_fraction(rows),
        )
        if self.seat.rank == 0:
            self._reporter.publish(finished=sample)

    # --- setting up and taking down --------------------------------------------------------------

    def _join_agent(self) -> ControlClient:
        if self.context.ingest_url is None:
            return NoControl()
        where = None
        if self.seat.rank == 0:
            self._agent = start_agent(self.context)
            where = (self._agent.host, self._agent.port)
        host, port = self._world.share(where)
        return connect(self.context, host, port)

    def _open_checkpoints(
        self, wanted: Checkpoint | None, optimizer: torch.optim.Optimizer | None
    ) -> Checkpoints | None:
        if wanted is None:
            return None
        stage = self._module
        if stage is None:
            assert isinstance(self._runner, EmulatedRunner)
            return Checkpoints(FilePath(wanted.directory), self._world, self._runner, None)
        return Checkpoints(FilePath(wanted.directory), self._world, stage, optimizer)

    def _resume(self) -> int:
        if self._checkpoints is None or self._checkpoint is None:
            return 0
        self._checkpoints.check()
        return self._checkpoints.resume() if self._checkpoint.resume else 0

    def _save_if_due(self) -> None:
        """Between two iterations, so after the optimizer's step."""
        if self._checkpoints is None or self._checkpoint is None:
            return
        if self.iteration % self._checkpoint.every == 0:
            self._waiting.begin(f"all ranks to save the checkpoint of iteration {self.iteration}")
            self._checkpoints.save(self.iteration)
            self._waiting.end()

    def _engine_options(
        self, path: PathChoice, transport: str, queues: int
    ) -> EngineOptions | None:
        """The engine runs where a link is delegated, or a directive may delegate one."""
        if self.seat.stages == 1:
            return None
        delegates = Path.DELEGATED in self._first_plan.paths
        if not delegates and path == "direct" and not isinstance(self._control, NoControl):
            return None
        if engine_module() is None:
            if delegates:
                raise InputError(
                    "the plan delegates links but the transfer engine is not built; run "
                    "`pip install -e .`, or use path direct"
                )
            return None
        name = self.context.job.metadata.name if self.context.job else "job"
        job = f"{self.context.namespace}/{name}/{self.context.attempt}"
        if self.context.job is None:
            return EngineOptions(job, transport, queues)
        wanted = self.context.job.spec.transport
        return EngineOptions(job, transport, queues, wanted.require, wanted.rdma)

    def _make_runner(self, stage: nn.Module | EmulatedStage, loss_fn: LossFn | None) -> Runner:
        self._needs_target = False
        if isinstance(stage, EmulatedStage):
            return EmulatedRunner(stage, self.seat.stage, self.seat.stages, self.seat.replica)
        self._needs_target = self.seat.last and loss_fn is not None
        return StageRunner(
            stage,
            is_first=self.seat.first,
            is_last=self.seat.last,
            loss_fn=loss_fn if self.seat.last else None,
            microbatches=self._microbatches,
            store=self._store,
        )

    def _open_store(
        self, stage: nn.Module | EmulatedStage, host_memory: int | None
    ) -> ActivationStore | None:
        if host_memory is None:
            self._no_offload = (
                "it has no host memory for activations; give adaptation.allowOffload and"
                " hostMemory (host_memory of Pipeline)"
            )
        if host_memory is None or isinstance(stage, EmulatedStage):
            return None
        return ActivationStore(self.device, host_memory, accelerator_of(self.device))

    def _check_offload(self, plan: Plan) -> None:
        limit = plan.device_limits[self.seat.stage]
        if limit is not None and self._no_offload:
            raise InputError(
                f"plan {plan.version} moves activations of stage {self.seat.stage} to host memory"
                f" (device_limit {limit}), but: {self._no_offload}"
            )

    def _check_seat(self, plan: Plan, path: PathChoice) -> None:
        if plan.schedule.stage_count != self.seat.stages:
            raise InputError(
                f"the plan has {plan.schedule.stage_count} stages; this job runs {self.seat.stages}"
            )

    def _check_paths(self, plan: Plan) -> None:
        for end in self._neighbours.ends:
            if end.link < len(plan.paths) and not end.has(plan.paths[end.link]):
                raise InputError(
                    f"plan {plan.version} delegates link {end.link}, which has no engine link; "
                    "build the transfer engine or plan for the direct path"
                )

    def _reserve_for(self, plan: Plan) -> None:
        """Grant receive slots for a plan's messages, as far as shapes are known."""
        for end in self._neighbours.ends:
            metas = (
                self._executor.input_metas
                if end.receives is Direction.FORWARD
                else tuple(m for m in self._executor.output_metas if m.carries_gradient)
            )
            self._reserve_plan(end, metas, plan)

    def _reserve_link(self, end: LinkEnd, metas: tuple[TensorMeta, ...]) -> None:
        """Shapes of a link became known: grant slots for every plan prepared so far."""
        for plan in self._plans.prepared():
            self._reserve_plan(end, metas, plan)

    def _reserve_plan(self, end: LinkEnd, metas: tuple[TensorMeta, ...], plan: Plan) -> None:
        delegated = Path.DELEGATED in (plan.paths[end.link], end.path)
        if not metas or end.delegated is None or not delegated:
            return
        slack = plan.warmup[end.link] - plan.warmup[end.link + 1]
        messages = min(self._microbatches, max(0, slack) + SPARE_SLOTS)
        end.delegated.reserve(messages, Batch(0, 0, self._microbatches, metas))

    def _on_block(self, end: LinkEnd, iteration: int, microbatch: int) -> None:
        """A send waits: on the direct path for the one two before it."""
        self._waiting.begin(end.taking(iteration, microbatch))

    def _on_broken(self, end: LinkEnd, why: str) -> None:
        """A direct path goes on delegated: nothing was granted there for it yet."""
        self._reserve_for(self._plans.in_force)
        self._reporter.publish(message=f"{self.seat}: {end}: the direct path broke: {why}")

    def _fail(self, error: BaseException) -> None:
        """Take down after an error, without waiting for anybody: peers see the line close."""
        if self._closed:
            return
        self._closed = True
        self._reporter.state = "failed"
        text = str(error) if isinstance(error, PipeMorphError) else repr(error)
        if not text.startswith(str(self.seat)):
            text = f"{self.seat}: {text}"
        # Asked to stop while it is taken down, a rank says this: the interpreter has not yet.
        self._failure = text
        try:
            self._reporter.publish(message=text)
        finally:
            self._release(goodbye=False)

    def _leave_traces(self) -> None:
        self._trace.close(self._neighbours.ends)

    def _release(self, *, goodbye: bool) -> None:
        self._leave_traces()
        if self._store is not None:
            self._store.close()
        for end in self._neighbours.ends:
            end.close(goodbye=goodbye)
        self._control.close()
        if self._agent is not None:
            self._agent.close()
        if self._neighbours.staging is not None:
            self._neighbours.staging.close(abandon=not goodbye)
        if self._neighbours.engine is not None:
            self._bell.forget(self._neighbours.engine.bell_fd)
            # After a failure there is nobody to flush to.
            self._neighbours.engine.close(5.0 if goodbye else 0.2)
        self._world.leave(clean=goodbye)
        if not any(end.receiving for end in self._neighbours.ends):
            self._bell.close()
        self._last_word.remove()
        sys.setswitchinterval(self._switch_interval)


def _plan_of(
    stages: int, microbatches: int | None, policy: Policy, dispatch: Dispatch, path: PathChoice
) -> Plan:
    """Plan 0 without a job: equal op times, no delay."""
    if microbatches is None:
        raise InputError("microbatches is missing; without a job file give it to Pipeline()")
    problem = Problem(
        microbatches=microbatches,
        stages=(StageTimes(forward=1, backward_input=1, backward_weight=1),) * stages,
        links=(Link(),) * (stages - 1),
        policy=policy,
    )
    paths = (Path.DELEGATED if path == "delegated" else Path.DIRECT,) * (stages - 1)
    return plan_schedule(problem).to_plan(0, paths, dispatch)


def _footprint_of(stage: nn.Module | EmulatedStage) -> Footprint:
    """Of an emulated stage what it is told to be; of a module nothing yet."""
    if not isinstance(stage, EmulatedStage):
        return Footprint()
    apart = stage.backward_input + stage.backward_weight
    return Footprint(
        activation_bytes=stage.activation_bytes,
        offload_copy=stage.offload_copy,
        fused_ratio=stage.whole_backward / apart if apart > 0 else None,
    )


def _device_of(module: nn.Module | None) -> torch.device:
    if module is None:
        return torch.device("cpu")
    first = next((t for t in (*module.parameters(), *module.buffers())), None)
    return first.device if first is not None else torch.device("cpu")
