"""Public class of the trainer: a pipeline with the ``step`` of torch's pipeline schedules."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipemorph.errors import InputError
from pipemorph.planning import Plan, Policy
from pipemorph.planning.ir import StagePlacement
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.backward.microbatch_state import LossFn
from pipemorph_trainer.checkpoint.memory.resume_point import ResumePoint, ResumeReport
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.executor.collector_pauses import CollectorPauses
from pipemorph_trainer.executor.inputs import (
    StepArguments,
    check_grad_mode,
    check_shared_graphs,
    join_microbatches,
)
from pipemorph_trainer.executor.microbatch_costs import SampleSizes, compute_costs, read_costs
from pipemorph_trainer.executor.stage_executor import MicrobatchInputs
from pipemorph_trainer.schedule.graceful_shutdown import (
    GracefulShutdown,
    PipelineTeardown,
    PlannedExit,
)
from pipemorph_trainer.schedule.microbatch_source import (
    WHOLE_BATCH_REFUSED,
    MicrobatchSource,
    check_source,
    draw_microbatches,
)
from pipemorph_trainer.schedule.pipeline_builder import PipelineArguments, PipelineComponents
from pipemorph_trainer.schedule.rank_preparation import (
    MakeOptimizer,
    MakeState,
    StageOrBuilder,
    State,
)
from pipemorph_trainer.schedule.state_saver import StateSaver
from pipemorph_trainer.settings import Options, RecomputeChoice, refuse_unknown
from pipemorph_trainer.sync.gradients import clip_grad_norm
from pipemorph_trainer.telemetry.progress_file import ProgressFile
from pipemorph_trainer.trackers.listeners import OnIteration

if TYPE_CHECKING:
    from pipemorph_trainer.sync.scaler import GradScaler

log = logging.getLogger("pipemorph.trainer")

T = TypeVar("T")
SWITCH_SECONDS = 1e-3
"""Seconds after which a receiver thread gets the interpreter; the default of 5 ms is half an op. A
shorter time costs CPU, since a thread that waits for the interpreter wakes up this often."""


RunCall = Callable[[int, dict[int, MicrobatchInputs], dict[int, Any], Exception | None], float]
"""Method ``run`` or ``evaluate`` of
:class:`~pipemorph_trainer.schedule.iteration.IterationRunner`."""


class CallRunner:
    """Calls of one pipeline. ``iteration``: the first one. Main thread only."""

    def __init__(
        self, parts: PipelineComponents, iteration: int, collector: CollectorPauses
    ) -> None:
        self._parts, self._over, self._collector = parts, iteration, collector
        self.last_activity = monotonic()
        """Time at which the script was last inside the pipeline."""
        self.stages_synchronized = False
        """True if all stages have waited for each other since the last step."""

    def run_call(
        self,
        run: RunCall,
        iteration: int,
        given: StepArguments,
        *,
        return_outputs: bool,
        needs_target: bool = True,
    ) -> tuple[Tensor, MicrobatchInputs]:
        """Run an iteration or an evaluation. Returns the loss, and the inputs of the last stage
        here, with its outputs."""
        if not given.evaluation:
            self._collector.begin_iteration()
        with self._parts.iterations.ops.window.measure_part("data"):
            inputs, shapes, refusal = self._prepare_inputs(
                given, needs_target=needs_target, keep=return_outputs
            )
        final = inputs[self._parts.coordinate.held_stages[-1]]
        return self._end_call(run(iteration, inputs, shapes, refusal)), final

    def run_drawn_step(
        self, iteration: int, source: MicrobatchSource, *, return_outputs: bool
    ) -> tuple[Tensor, MicrobatchInputs]:
        """Run an iteration with microbatches of ``source``, drawn once the plan is known. Returns
        the loss, and the inputs of the last stage here, with its outputs."""
        inputs: dict[int, MicrobatchInputs] = {}
        parts = self._parts

        def draw(
            plan: RankPlan, first: int
        ) -> tuple[dict[int, MicrobatchInputs], dict[int, Any], Exception | None]:
            given, failure = StepArguments(), None
            try:
                shares = parts.iterations.position.list_shares(plan)
                given = draw_microbatches(source, shares, parts.coordinate.dp_rank, first)
            except Exception as error:  # noqa: BLE001  all ranks get any error
                failure = error
            prepared = self._prepare_inputs(given, failure=failure, keep=return_outputs)
            inputs.update(prepared[0])
            return prepared

        self._collector.begin_iteration()
        loss = parts.iterations.run_iteration(iteration, {}, {}, draw=draw)
        return self._end_call(loss), inputs[parts.coordinate.held_stages[-1]]

    def _end_call(self, loss: float) -> Tensor:
        if self._parts.agent is not None:
            self._parts.agent.restart_if_ended()
        self.last_activity = monotonic()
        return torch.tensor(loss, dtype=torch.float32)

    def _prepare_inputs(
        self,
        given: StepArguments,
        *,
        needs_target: bool = True,
        keep: bool,
        failure: Exception | None = None,
    ) -> tuple[dict[int, MicrobatchInputs], dict[int, Any], Exception | None]:
        """Return the inputs of each stage here, signatures of their shapes, and the error if they
        do not fit. ``keep``: collect the outputs of the last stage. ``failure``: reason why they
        could not be drawn."""
        found = self._select_inputs(given, needs_target=needs_target, failure=failure)
        inputs, _, refusal = found
        final = inputs[self._parts.coordinate.held_stages[-1]]
        self._complete_inputs(final, given, refused=refusal is not None, keep=keep)
        return found

    def _select_inputs(
        self, given: StepArguments, *, needs_target: bool, failure: Exception | None
    ) -> tuple[dict[int, MicrobatchInputs], dict[int, Any], Exception | None]:
        inputs = {stage: MicrobatchInputs() for stage in self._parts.coordinate.held_stages}
        shapes: dict[int, Any] = dict.fromkeys(inputs)
        if failure is not None:
            return inputs, shapes, failure
        try:
            whole = given.count is None and not given.evaluation
            if whole and self._parts.settings.rebalance and given.has_batch:
                raise InputError(WHOLE_BATCH_REFUSED)
            if self._parts.replicas is not None and not given.evaluation:
                self._parts.replicas.check_parameters()
            for stage, own in self._parts.stages.items():
                inputs[stage], shapes[stage] = own.select_inputs(given, needs_target=needs_target)
                if not given.evaluation:
                    check_shared_graphs(self._parts.coordinate.with_stage(stage), inputs[stage])
            if not given.evaluation:
                costs = self._read_costs(given, inputs.get(0))
                inputs[min(inputs)].costs = self._parts.iterations.fitter.price_microbatches(costs)
        except Exception as error:  # noqa: BLE001  all ranks get any error
            return inputs, shapes, error
        return inputs, shapes, None

    def _read_costs(
        self, given: StepArguments, first: MicrobatchInputs | None
    ) -> tuple[float, ...] | tuple[SampleSizes, ...]:
        """Return the costs or sizes of the microbatches that were given, else of ``first``, the
        inputs of stage 0; empty if there are none, or if this rank does not have stage 0."""
        cost_fn = self._parts.cost_fn
        microbatches = given.count or self._parts.plans.current_plan.microbatches
        if given.costs is not None:
            return read_costs(given.costs, microbatches)
        if first is None or cost_fn is None:
            return ()
        return compute_costs(cost_fn, first.args, first.kwargs, microbatches)

    def _complete_inputs(
        self, final: MicrobatchInputs, given: StepArguments, *, refused: bool, keep: bool
    ) -> None:
        """Complete the inputs of the last stage, if it is here. ``keep``: collect its outputs."""
        if not self._parts.coordinate.is_last:
            return
        if refused and given.weight is not None:
            # The other replicas wait for the weight of this one.
            final.divisor = 0.0
        if keep:
            final.outputs = []
        if self._parts.scaler is not None:
            final.scale = self._parts.scaler.get_scale()

    def end_iteration(self, iteration: int, at: float) -> None:
        """End the iteration before ``iteration`` at the time ``at``, once even if a step is
        refused."""
        if iteration > self._over:
            self._over = iteration
            self._parts.iterations.ops.publish()
            self._parts.iterations.reports.reducer.end_iteration(
                iteration - 1, at, self.had_barrier(), self._collector.end_iteration()
            )
            self.stages_synchronized = False

    def had_barrier(self) -> bool | None:
        """Return True if all stages have waited for each other since the last iteration; None if
        another trainer runs the code between two iterations."""
        parts = self._parts
        if self.stages_synchronized or parts.tied is not None or parts.scaler is not None:
            return True
        stages = parts.stages.values()
        return False if all(own.emulated or own.module is not None for own in stages) else None


class Pipeline:
    """Pipeline: one stage of it, or several, on every rank.

    With a job file in the context, the settings come from the job, and an argument that contradicts
    it is an error. Without one (plain torchrun) they come from the arguments.

    Replicas of a stage begin with the parameters and buffers of replica 0, as in torch's
    ``DistributedDataParallel``. Rank 0 logs a warning if any of them differed.

    Args:
        stage: any ``nn.Module``, plain or distributed over ``mesh`` by ``parallelize_module`` and
            ``fully_shard`` (no DDP, no FSDP1), an :class:`EmulatedStage`, or a function that builds
            the module of a :class:`~pipemorph_trainer.ModelShard` of the model. With several stages
            per rank a list of those of this rank, in order (:attr:`TrainerContext.coordinate` has
            their numbers in ``held_stages``), or such a function, which is called for each. Stage 0
            gets the arguments of :meth:`step`, stage *i* what stage *i-1* returned: a tuple or list
            as positional arguments, a dict as keyword arguments, anything else as one argument.
        context: identity of this rank, from :meth:`TrainerContext.from_env`.
        loss_fn: ``loss_fn(output, target)`` → scalar; needed on the last stage unless its
            module returns the loss itself.
        microbatches: N; :meth:`step` splits its batch into N along dimension 0.
        optimizer: saved in checkpoints; the caller steps it. Or a function that makes it for the
            module, or for an ``nn.ModuleList`` of several: then it is :attr:`optimizer`.
        checkpoint: a :class:`~pipemorph_trainer.Checkpoint`: where and how often to save, and
            whether to resume (default: yes). After a resume, :attr:`start_iteration` is the
            iteration to continue with.
        recompute: ``auto``: plans may drop activations and run forwards again. ``never``, the
            default: a plan with recomputation is refused.
        split: ``auto``: weight gradients that can wait for W do. ``fused``: none does. ``verify``:
            as ``auto``, and each that waits is compared with that of the original op.
        mesh: torch's mesh of all ranks, with the dimensions ``pp``, ``dp_replicate``,
            ``dp_shard``, ``cp`` and ``tp`` in any order; those of size 1 may be absent.
            :func:`pipemorph_trainer.make_mesh` makes it. Default: the job's, or stages × replicas.
        stages: number of pipeline stages, without a job or a mesh; default: as many as fit on all
            ranks.
        stages_per_rank: number of stages of each rank; default: 1. With more, ``pp`` has fewer
            ranks than stages, and each rank runs its stages in turns, in a static order.
        placement: ``interleaved``, the default: rank *r* of *n* has every *n*-th stage from *r* on.
            ``v``: in turns from the first rank to the last and back.
        policy: how ops are scheduled; default: ``pipemorph``.
        plan: run this plan instead of one made with ``policy``.
        deadline_seconds: longest wait for one message; default: 300.
        tied: parameters of several stages that are one weight, as ``[("embed.weight", 0),
            ("head.weight", -1)]``, or a list of such lists. All begin with the value of the first.
            Their gradients are summed over the stages, they count once in the gradient norm, and
            they have one name in checkpoints. Their optimizers have to be equal.
        state: further objects that this rank saves in checkpoints and restores on a resume, by
            name. They have ``state_dict`` and ``load_state_dict``, like a learning-rate scheduler.
            Or a function that makes them for the optimizer.
        scaler: a :class:`~pipemorph_trainer.GradScaler`, for gradients in fp16.
        on_iteration: called on rank 0 with each
            :class:`~pipemorph_trainer.trackers.FinishedIteration`, on its arrival, in its own
            thread; or several such functions. Other ranks call none. An error there is a warning.
        options: :class:`~pipemorph_trainer.Options`, for settings that few scripts need.

    Raises :class:`InputError` on all ranks if the stage, the job and the ranks do not fit, even if
    only one rank can see it. Raises :class:`PipelineError` if a neighbour does not connect.
    """

    def __init__(
        self,
        stage: StageOrBuilder,
        *,
        context: TrainerContext,
        loss_fn: LossFn | None = None,
        microbatches: int | None = None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        mesh: DeviceMesh | None = None,
        stages: int | None = None,
        stages_per_rank: int | None = None,
        placement: StagePlacement | None = None,
        policy: Policy | str | None = None,
        plan: Plan | None = None,
        deadline_seconds: float | None = None,
        checkpoint: Checkpoint | None = None,
        recompute: RecomputeChoice | None = None,
        split: str = "auto",
        tied: Sequence[Any] | None = None,
        state: State | MakeState | None = None,
        scaler: GradScaler | None = None,
        on_iteration: OnIteration | Sequence[OnIteration] | None = None,
        options: Options | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown("Pipeline", unknown)
        options = options or Options()
        self.context = context
        given = {
            "stages": stages, "stages_per_rank": stages_per_rank, "placement": placement,
            "microbatches": microbatches,
            "policy": None if policy is None else Policy(policy),
            "deadline_seconds": deadline_seconds, "checkpoint": checkpoint, "recompute": recompute,
            **options.to_settings(),
        }  # fmt: skip
        self._parts = PipelineComponents(
            stage, context, given,
            PipelineArguments(
                mesh=mesh, plan=plan, split=split, loss_fn=loss_fn,
                optimizer=optimizer, control=options.control, cost_fn=options.cost_fn, tied=tied,
                state=state, scaler=scaler, on_iteration=on_iteration,
            ),
        )  # fmt: skip
        self.device, self.coordinate = self._parts.device, self._parts.coordinate
        self._ending = PipelineTeardown(self._parts, self._release_components)
        self._switch_interval = sys.getswitchinterval()
        resumed = self._parts.resume_state()
        self.start_iteration = resumed.iteration
        self._parts.iterations.reports.adopt_unreported(resumed.unreported)
        self._parts.iterations.resume_position(resumed.iteration)
        self.iteration = self.start_iteration
        self._collector = CollectorPauses(self._parts.settings.gc, str(self.coordinate))
        self._parts.iterations.set_collector(self._collector)
        self._window = self._parts.iterations.ops.window
        self._call_runner = CallRunner(self._parts, self.iteration, self._collector)
        self._saving = StateSaver(self._parts, resumed)
        self._leaving = GracefulShutdown(
            self._parts, self._saving, context,
            describe=self.current_wait, last=self._finish_traces,
        )  # fmt: skip
        self._saves = (
            self._parts.memory_checkpointer is not None or self._parts.checkpoints is not None
        )
        self._mark_batch_position()
        if not resumed.from_memory:
            self._saving.copy_state(self.iteration)
        self._parts.connect_neighbours()
        self._progress: ProgressFile | None = None
        if context.progress_dir is not None:
            self._progress = ProgressFile(context.progress_dir, context.rank, self.iteration)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._leaving.install_handlers()
        self._parts.reporter.publish(message=self._describe_start(resumed))
        self._word = self._make_resume_report(resumed)
        if self._word is not None:
            self._word.report_if_due(self.iteration)

    # --- public methods -----------------------------------------------------------------

    @overload
    def step(self, *args: Any, return_outputs: Literal[False] = False, **kwargs: Any) -> Tensor: ...

    @overload
    def step(
        self, *args: Any, return_outputs: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Any]: ...

    def step(
        self,
        *args: Any,
        target: Any = None,
        weight: Tensor | float | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        costs: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None,
        microbatches: MicrobatchSource | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Any]:
        """Run one iteration: forward and backward of all microbatches.

        Call it on every rank. Only stage 0 uses ``args``: tensors of shape (batch, …) are split
        into N microbatches along dimension 0, other values go to all of them. Only the last stage
        uses ``target``. Other stages may omit them. ``kwargs`` are split in the same way and go to
        **this** rank's stage, as in ``torch.distributed.pipelining``: pass a mask that every stage
        needs on every rank; it is not sent between stages. They get no gradient.

        Pass a batch that is split already as lists of N: ``arg_mbs`` of tuples, ``kwarg_mbs`` of
        dicts, ``target_mbs``. ``weight``, on the last stage: weight of the batch, such as its mask
        of tokens that are no padding (a tensor, which is summed) or their number. ``loss_fn`` then
        returns the weighted **sum** of its losses, and the mean is over the weights of all
        microbatches and columns; give it in all columns or in none.

        ``costs``, on stage 0: N numbers that are proportional to the op times of the microbatches,
        such as their tokens, in one unit in all steps; or N sequences of the lengths of their
        samples, to which the trainer fits the costs within a few iterations. Then a batch with more
        work does not count as a slower stage. Those of other stages are only checked.

        ``microbatches``: source of the microbatches instead, on every rank that uses some: an
        iterator of those of this replica, a function of the number of a microbatch in the whole
        run, or that of a :class:`~pipemorph_trainer.data.BalancedBatchSampler`. Each is a
        :class:`~pipemorph_trainer.Microbatch`, or a pair of input and target. As many are drawn as
        the plan has for this replica, see :attr:`microbatches_drawn`; also if ``step`` raises
        :class:`BatchError`.

        Returns the loss on **every** rank: the mean over microbatches and columns, 0-dim float32.
        Gradients are added to ``.grad``, averaged over the ranks with other data. With
        ``return_outputs``, also returns the outputs of the last stage, without gradients and joined
        along dimension 0; None on other stages.

        Raises :class:`BatchError` on every rank if the batch of one of them does not fit; then no
        gradient has changed, and ``step`` can be called again. Raises :class:`PipelineError` if a
        message does not arrive, :class:`ShapeError` if shapes differ between microbatches, and
        :class:`InputError` if gradients are switched off (``torch.no_grad``) or all iterations of
        the manifest are done.
        """
        self._ending.check_open("step")
        check_grad_mode(self.coordinate)
        if self.context.job is not None and self.iteration >= self.context.iterations:
            raise InputError(
                f"{self.coordinate}: step() was called after all {self.iteration} iterations of "
                "the manifest; step from pipe.start_iteration to spec.trainer.iterations, or "
                "raise that"
            )
        given = StepArguments(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, weight, costs)
        if microbatches is not None:
            check_source(microbatches, given)
        with self._ending.fail_on_error():
            self._window.begin_step()
            if self._saves:
                with self._window.measure_part("checkpoint"):
                    self._copy_state()
            self._collector.pass_boundary(requested=self._parts.iterations.moves_collector)
            self._call_runner.end_iteration(self.iteration, monotonic())
            if self._saves:
                with self._window.measure_part("checkpoint"):
                    self._saving.save_if_due(self.iteration)
            leaving = self._leaving
            if leaving.ending or leaving.changing_layout:
                self._exit_if_planned(leaving.save_before_end(self.iteration))
                self._exit_if_planned(leaving.seal_before_layout_change(self.iteration))
            if microbatches is None:
                loss, inputs = self._call_runner.run_call(
                    self._parts.iterations.run_iteration, self.iteration, given,
                    return_outputs=return_outputs,
                )  # fmt: skip
            else:
                loss, inputs = self._call_runner.run_drawn_step(
                    self.iteration, microbatches, return_outputs=return_outputs
                )
            self.iteration += 1
            if self._progress is not None:
                self._progress.record_finished(self.iteration)
            if self._word is not None:
                self._word.report_if_due(self.iteration)
            iterations = self._parts.iterations
            self._saving.synchronized = iterations.synchronizes
            if iterations.is_ending or iterations.is_changing_layout or leaving.changing_layout:
                leaving.update_requests()
            self._mark_batch_position()
        return (loss, join_microbatches(inputs.outputs)) if return_outputs else loss

    @overload
    def evaluate(
        self, *args: Any, return_outputs: Literal[False] = False, **kwargs: Any
    ) -> Tensor: ...

    @overload
    def evaluate(
        self, *args: Any, return_outputs: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Any]: ...

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        weight: Tensor | float | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Any]:
        """Run the forwards of all microbatches, without gradients.

        Call it on every rank, at any time between two steps and also before the first one. It is no
        iteration: ``.grad``, the plan and all measurements do not change. Modules run in their
        current mode, so call ``module.eval()`` before, and ``module.train()`` after.

        Arguments, results and errors are those of :meth:`step`; the batch may have another size.
        With ``return_outputs`` the target may be missing; then the loss is NaN.
        """
        self._ending.check_open("evaluate")
        given = StepArguments(
            args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, weight, evaluation=True
        )
        with self._ending.fail_on_error():
            self._collector.pass_boundary(requested=self._parts.iterations.moves_collector)
            self._call_runner.end_iteration(self.iteration, monotonic())
            loss, inputs = self._call_runner.run_call(
                self._parts.iterations.run_evaluation, self.iteration, given,
                return_outputs=return_outputs, needs_target=not return_outputs,
            )  # fmt: skip
            self._mark_batch_position()
            self._window.restart()
        return (loss, join_microbatches(inputs.outputs)) if return_outputs else loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients by their 2-norm over **all** stages; every element counts once. Call it on
        every rank.

        Returns the norm before clipping, 0-dim float32, the same on all ranks. Emulated stages
        have no gradients but take part in the collective.
        """
        self._ending.check_open("clip_grad_norm_")
        parts = self._parts
        parameters = [
            pair
            for own in parts.stages.values()
            if own.module is not None
            for pair in own.module.named_parameters()
        ]
        with self._ending.fail_on_error():
            parts.waiting.begin_wait(
                f"the gradient norm of iteration {self.iteration - 1} of all stages"
            )
            began = monotonic()
            norm = clip_grad_norm(
                parameters, max_norm, parts.world, parts.placements, parts.wait_for,
                uncounted=parts.tied.uncounted if parts.tied is not None else (),
            )  # fmt: skip
            parts.iterations.ops.add_norm(began)
            parts.waiting.end_wait()
        self._call_runner.stages_synchronized = True
        self._call_runner.last_activity = monotonic()
        return norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which :meth:`step` does not average gradients over replicas, as in torch's
        ``DistributedDataParallel``: the next step outside averages their sum. Use it on all ranks.
        A checkpoint that is due is saved after that step."""
        iterations = self._parts.iterations
        before, iterations.synchronizes = iterations.synchronizes, False
        try:
            yield
        finally:
            iterations.synchronizes = before

    def save(self) -> Path:
        """Save a checkpoint now. Call it on every rank, after the optimizer's step. Returns its
        folder.

        Raises :class:`InputError` if no checkpoint folder was given, or in an accumulation whose
        last step was in :meth:`no_sync`, and :class:`PipelineError` if it cannot be written.
        """
        self._ending.check_open("save")
        if self._parts.checkpoints is None:
            raise InputError(
                f"{self.coordinate}: save() needs a folder: give Pipeline checkpoint=, or the "
                "manifest spec.checkpoint"
            )
        if not self._saving.synchronized:
            raise InputError(
                f"{self.coordinate}: save() was called after a step in no_sync(), when gradients "
                "differ between replicas; call it after a step outside"
            )
        with self._ending.fail_on_error():
            self._call_runner.end_iteration(self.iteration, monotonic())
            with self._window.measure_part("checkpoint"):
                return self._saving.save_checkpoint(self._parts.checkpoints, self.iteration)

    def current_wait(self) -> str:
        """Describe this rank's current wait, or its failure. Callable from any thread."""
        return self._ending.failure or self._parts.waiting.describe_wait()

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of all ranks. Without a mesh from the user it has ``pp`` and the dimensions with
        more than one rank."""
        return self._parts.world.mesh

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage, which gets the arguments of :meth:`step`."""
        return self.coordinate.is_first

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, which computes the loss."""
        return self.coordinate.is_last

    @property
    def split(self) -> str:
        """Split of the backward on this rank's only stage: deferred, fused or emulated. Final after
        the first step. Raises :class:`InputError` if there are several, see :attr:`splits`."""
        return self._require_single("split", "splits", list(self.splits.values()))

    @property
    def splits(self) -> dict[int, str]:
        """Split of the backward by stage of this rank, as in :attr:`split`."""
        return {stage: own.runner.split for stage, own in self._parts.stages.items()}

    @property
    def module(self) -> nn.Module:
        """Module of this rank's only stage. Raises :class:`InputError` if the stage is emulated, or
        if there are several, see :attr:`modules`."""
        return self._require_single("module", "modules", list(self.modules.values()))

    @property
    def modules(self) -> dict[int, nn.Module]:
        """Modules of this rank's stages. Raises :class:`InputError` if they are emulated."""
        found = {stage: own.module for stage, own in self._parts.stages.items()}
        return {stage: self._require_module(module) for stage, module in found.items()}

    def _require_module(self, module: nn.Module | None) -> nn.Module:
        if module is None:
            raise InputError(f"{self.coordinate}: the stage is emulated; it has no module")
        return module

    def _require_single(self, name: str, several: str, found: list[T]) -> T:
        if len(found) > 1:
            raise InputError(f"{self.coordinate}: {name} is for one stage; use {several}")
        return found[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the pipeline. Raises :class:`InputError` if there is none."""
        if self._parts.optimizer is None:
            raise InputError(f"{self.coordinate}: Pipeline was given no optimizer")
        return self._parts.optimizer

    @property
    def state(self) -> State:
        """Objects that were given as ``state``, or made by that function."""
        return self._parts.state

    @property
    def plan(self) -> RankPlan:
        """Part of the current plan that this rank runs."""
        return self._parts.plans.current_plan

    @property
    def microbatch_order(self) -> tuple[int, ...]:
        """Order in which the microbatches of the last step ran: element *k* is the one that ran as
        the *k*-th. Empty: in their own order, see ``reorder`` of :class:`Options`."""
        return self._parts.iterations.work.order

    @property
    def microbatches_drawn(self) -> int:
        """Number of microbatches that this replica has drawn so far, also before a resume: the
        position to which a script sets its iterator."""
        return self._parts.iterations.position.drawn[self.coordinate.dp_rank]

    def install_plan(self, plan: Plan) -> None:
        """Prepare a plan on this rank, like one from a directive. When all stages of a pipeline
        have prepared it during iteration t, it runs on all of them from iteration t+1 on.

        Raises :class:`InputError` if it does not fit this job.
        """
        self._parts.iterations.plan_receiver.install_plan(plan)

    def close(self) -> None:
        """Wait for all ranks, end the connections, and release everything. Idempotent.

        Afterwards raises :class:`InputError` if the manifest has more iterations than were run: the
        job is not complete.
        """
        if self._ending.closed or self._ending.is_forked:
            return
        with self._ending.fail_on_error():
            self._copy_state()
            self._call_runner.end_iteration(self.iteration, self._call_runner.last_activity)
            self._saving.save_if_due(self.iteration)
            self._exit_if_planned(self._leaving.save_before_end(self.iteration))
            self._saving.finish_writing()
            self._parts.iterations.reports.finish_all()
            if self._word is not None:
                self._word.write_once()
        wanted = self.context.iterations
        early = ""
        if self.iteration < wanted:
            early = (
                f"{self.coordinate}: closed after {self.iteration} of the {wanted} iterations of "
                "the manifest; step from pipe.start_iteration to spec.trainer.iterations, or "
                "lower that"
            )
        self._ending.close("failed" if early else "finished", early or None)
        if early:
            raise InputError(early)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._ending.fail_pipeline(error)
        else:
            self.close()

    # --- iterations, and the work between them --------------------------------------------------

    def _mark_batch_position(self) -> None:
        leaving = self._leaving
        if self._saves:
            self._saving.mark_batch_position(
                self.iteration, leaving=leaving.ending, moving=leaving.changing_layout
            )

    def _copy_state(self) -> None:
        self._saving.copy_state(self.iteration, moving=self._leaving.changing_layout)

    def _describe_start(self, resumed: ResumePoint) -> str | None:
        """Log the origin of the state. Returns the message of rank 0, else None."""
        context = self.context
        if self.coordinate.rank != 0 or (resumed.iteration == 0 and context.generation == 0):
            return None
        if context.memory_dir is not None and context.generation > 0:
            log.info("%s", resumed)
        return str(resumed)

    def _make_resume_report(self, resumed: ResumePoint) -> ResumeReport | None:
        context, keeper = self.context, self._parts.memory_checkpointer
        if self.coordinate.rank != 0 or context.generation == 0 or context.memory_dir is None:
            return None
        counts_from = -1 if keeper is None else keeper.counts_from
        return ResumeReport(context.memory_dir, context.generation, resumed, counts_from)

    # --- taking down --------------------------------------------------------------------------

    def _exit_if_planned(self, departure: PlannedExit | None) -> None:
        """End this rank like all others, if that is planned. Raises :class:`SystemExit`, so that
        the script's ``finally`` and ``with`` run."""
        if departure is not None:
            self._saving.finish_writing()
            self._parts.iterations.reports.finish_all()
            self._ending.exit_as_planned(departure)

    def _finish_traces(self) -> None:
        self._parts.finish_traces(self.iteration)

    def _release_components(self, goodbye: bool) -> None:
        self._collector.close()
        self._window.close()
        self._parts.close(goodbye=goodbye, iterations=self.iteration)
        if self._progress is not None:
            self._progress.close()
        self._leaving.remove_handlers()
        sys.setswitchinterval(self._switch_interval)
