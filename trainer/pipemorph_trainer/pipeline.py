"""The trainer's public class: a pipeline with the ``step`` of torch's pipeline schedules."""

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

from pipemorph.api.sections.trainer import Checkpoint
from pipemorph.errors import InputError
from pipemorph.planning import Plan, Policy
from pipemorph.planning.ir import StagePlacement
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.executor.dispatch import Inputs
from pipemorph_trainer.executor.inputs import Given, check_grad_mode, check_graphs, join
from pipemorph_trainer.executor.split.flight import LossFn
from pipemorph_trainer.preparation import MakeOptimizer, MakeState, StageOrBuilder, State
from pipemorph_trainer.settings import Options, RecomputeChoice, refuse_unknown
from pipemorph_trainer.state.gradients import clip_grad_norm
from pipemorph_trainer.state.kept.resumed import Resumed, Word
from pipemorph_trainer.steps.leaving import Departure, Ending, Leaving
from pipemorph_trainer.steps.parts import Arguments, Parts
from pipemorph_trainer.steps.saving import Saving
from pipemorph_trainer.telemetry.progress import Progress
from pipemorph_trainer.trackers.listeners import OnIteration

if TYPE_CHECKING:
    from pipemorph_trainer.state.scaler import GradScaler

log = logging.getLogger("pipemorph.trainer")

T = TypeVar("T")
SWITCH_SECONDS = 1e-3
"""Time after which a receiver thread gets the interpreter; the default of 5 ms is half an op. A
shorter time costs CPU, since a thread that waits for the interpreter wakes up this often."""


Run = Callable[[int, dict[int, Inputs], dict[int, Any], Exception | None], float]
"""``run`` or ``evaluate`` of :class:`~pipemorph_trainer.steps.iteration.Iterations`."""


class Calls:
    """The calls of one pipeline. ``iteration``: the first one. Main thread only."""

    def __init__(self, parts: Parts, iteration: int) -> None:
        self._parts, self._over = parts, iteration
        self.last_activity = monotonic()
        """When the script was last inside the pipeline."""
        self.met = False
        """Whether all stages have waited for each other since the last step."""

    def run(
        self,
        run: Run,
        iteration: int,
        given: Given,
        *,
        return_outputs: bool,
        needs_target: bool = True,
    ) -> tuple[Tensor, Inputs]:
        """Run an iteration or an evaluation. Returns the loss and the inputs of the last stage
        here, with the outputs."""
        inputs, shapes, refusal = self._inputs(given, needs_target=needs_target)
        final = inputs[self._parts.coordinate.held[-1]]
        self._complete(final, given, refused=refusal is not None, keep=return_outputs)
        loss = run(iteration, inputs, shapes, refusal)
        if self._parts.agent is not None:
            self._parts.agent.tend()
        self.last_activity = monotonic()
        return torch.tensor(loss, dtype=torch.float32), final

    def _inputs(
        self, given: Given, *, needs_target: bool
    ) -> tuple[dict[int, Inputs], dict[int, Any], Exception | None]:
        """The inputs of each stage here, and what changes if their shapes do; and why they do not
        fit, if so."""
        inputs = {stage: Inputs() for stage in self._parts.coordinate.held}
        shapes: dict[int, Any] = dict.fromkeys(inputs)
        try:
            if self._parts.replicas is not None and not given.evaluation:
                self._parts.replicas.check()
            for stage, own in self._parts.stages.items():
                inputs[stage], shapes[stage] = own.inputs(given, needs_target=needs_target)
                if not given.evaluation:
                    check_graphs(self._parts.coordinate.of(stage), inputs[stage])
        except Exception as error:  # noqa: BLE001  all ranks are told of any error
            return inputs, shapes, error
        return inputs, shapes, None

    def _complete(self, final: Inputs, given: Given, *, refused: bool, keep: bool) -> None:
        """Complete the inputs of the last stage, if it is here. ``keep``: its outputs."""
        if not self._parts.coordinate.last:
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
            self._parts.iterations.reports.rounds.end(iteration - 1, at, self.barrier())
            self.met = False

    def barrier(self) -> bool | None:
        """Whether all stages have waited for each other since the last iteration; None if the
        stage's own trainer does what is between two iterations."""
        parts = self._parts
        if self.met or parts.tied is not None or parts.scaler is not None:
            return True
        stages = parts.stages.values()
        return False if all(own.emulated or own.module is not None for own in stages) else None


class Pipeline:
    """One stage of a pipeline, or several, on every rank of it.

    If the context has a job file, the settings come from the job, and an argument that contradicts
    it is an error. Without one (plain torchrun) they come from the arguments.

    All replicas of a stage begin with the parameters and buffers of replica 0, as in torch's
    ``DistributedDataParallel``. Rank 0 logs a warning if any of them differed.

    Args:
        stage: any ``nn.Module``, plain or distributed over ``mesh`` by ``parallelize_module`` and
            ``fully_shard`` (no DDP, no FSDP1), an :class:`EmulatedStage`, or a function that builds
            the module of a :class:`~pipemorph_trainer.Part` of the model. With several stages per
            rank a list of those of this rank, in order (:attr:`TrainerContext.coordinate` has their
            numbers in ``held``), or such a function, which is called for each. Stage 0 gets the
            arguments of :meth:`step`, stage *i* what stage *i-1* returned: a tuple or list as
            positional arguments, a dict as keyword arguments, anything else as one argument.
        context: identity of this rank, from :meth:`TrainerContext.from_env`.
        loss_fn: ``loss_fn(output, target)`` → scalar; needed on the last stage unless its
            module returns the loss itself.
        microbatches: N; :meth:`step` splits its batch into N along dimension 0.
        optimizer: saved in checkpoints; the caller steps it. Or a function that makes it for the
            module, or for an ``nn.ModuleList`` of several: then it is :attr:`optimizer`.
        checkpoint: a :class:`~pipemorph_trainer.Checkpoint`: where and how often to save, and
            whether to resume (it does, unless told not to). After a resume,
            :attr:`start_iteration` is the iteration to continue with.
        recompute: ``auto``: plans may drop activations and run forwards again. ``never``, the
            default: a plan with recomputation is refused.
        split: ``auto``: weight gradients that can wait for W do. ``fused``: none does. ``verify``:
            as ``auto``, and each that waits is compared with that of the original op.
        mesh: torch's mesh of all ranks, with the dimensions ``pp``, ``dp_replicate``,
            ``dp_shard``, ``cp`` and ``tp`` in any order; those of size 1 may be absent.
            :func:`pipemorph_trainer.make_mesh` makes it. Default: the job's, or stages × replicas.
        stages: number of pipeline stages, without a job or a mesh; default: as many as fit on all
            ranks.
        stages_per_rank: number of stages of each rank; default: 1. ``pp`` then has fewer ranks
            than stages, and the ranks run the stages in turns, in a static order.
        placement: ``interleaved``, the default: rank *r* of *n* has every *n*-th stage from *r* on.
            ``v``: in turns from the first rank to the last and back.
        policy: how ops are scheduled; default: ``pipemorph``.
        plan: run this plan instead of one made with ``policy``.
        deadline_seconds: longest wait for one message; default: 300.
        tied: parameters of several stages that are one weight, as ``[("embed.weight", 0),
            ("head.weight", -1)]``, or a list of such lists. All begin with the value of the first.
            Their gradients are summed over the stages, they count once in the gradient norm, and
            they have one name in checkpoints. Their optimizers have to be equal.
        state: what else this rank saves in checkpoints and gets back on a resume, by name: objects
            with ``state_dict`` and ``load_state_dict``, such as a learning-rate scheduler. Or a
            function that makes them for the optimizer.
        scaler: a :class:`~pipemorph_trainer.GradScaler`, for gradients in fp16.
        on_iteration: called on rank 0 with each
            :class:`~pipemorph_trainer.trackers.FinishedIteration`, as it hears of them, in a thread
            of its own; or several such functions. Other ranks call none. An error there is a
            warning.
        options: :class:`~pipemorph_trainer.Options`, for settings that few scripts need.

    Raises :class:`InputError` on all ranks if the stage, the job and the ranks do not fit, even if
    only one of them noticed. Raises :class:`PipelineError` if a neighbour does not connect.
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
            **options.settings(),
        }  # fmt: skip
        self._parts = Parts(
            stage, context, given,
            Arguments(
                mesh=mesh, plan=plan, split=split, loss_fn=loss_fn,
                optimizer=optimizer, control=options.control, tied=tied, state=state,
                scaler=scaler, on_iteration=on_iteration,
            ),
        )  # fmt: skip
        self.device, self.coordinate = self._parts.device, self._parts.coordinate
        self._ending = Ending(self._parts, self._release)
        self._switch_interval = sys.getswitchinterval()
        resumed = self._parts.resume()
        self.start_iteration = resumed.iteration
        self._parts.iterations.reports.adopt(resumed.unreported)
        self.iteration = self.start_iteration
        self._calls = Calls(self._parts, self.iteration)
        self._saving = Saving(self._parts, resumed)
        self._leaving = Leaving(
            self._parts, self._saving, context,
            describe=self.current_wait, last=self._leave_traces,
        )  # fmt: skip
        self._saves = self._parts.keeper is not None or self._parts.checkpoints is not None
        self._mark()
        if not resumed.from_memory:
            self._saving.keep(self.iteration)
        self._parts.meet_neighbours()
        self._progress: Progress | None = None
        if context.progress_dir is not None:
            self._progress = Progress(context.progress_dir, context.rank, self.iteration)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._leaving.install()
        self._parts.reporter.publish(message=self._told(resumed))
        self._word = self._word_of(resumed)
        if self._word is not None:
            self._word.finished(self.iteration)

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
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Any]:
        """Run one iteration: forward and backward of all microbatches.

        Call it on every rank. Only stage 0 uses ``args``: tensors of shape (batch, …) are split
        into N microbatches along dimension 0, other values go to all of them. Only the last stage
        uses ``target``. Other stages may pass them or nothing. ``kwargs`` are split in the same way
        and go to **this** rank's stage, as in ``torch.distributed.pipelining``: a mask that every
        stage needs is passed on every rank instead of being sent. They get no gradient.

        A batch that is split already is passed as lists of N: ``arg_mbs`` of tuples, ``kwarg_mbs``
        of dicts, ``target_mbs``. ``weight``, on the last stage: how much the batch counts, such as
        its mask of tokens that are no padding (a tensor, which is summed) or their number.
        ``loss_fn`` then returns the weighted **sum** of its losses, and the mean is over the
        weights of all microbatches and columns; give it in all columns or in none.

        Returns the loss on **every** rank: the mean over microbatches and columns, 0-dim
        float32. Gradients are added to ``.grad``, averaged over the ranks with other data. With
        ``return_outputs``, returns the loss and what the last stage returned, without gradients and
        joined along dimension 0; None on other stages.

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
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, weight)
        with self._ending.failing():
            if self._saves:
                self._keep()
            self._calls.end_iteration(self.iteration, monotonic())
            if self._saves:
                self._saving.save_if_due(self.iteration)
            leaving = self._leaving
            if leaving.ending or leaving.moving:
                self._leave(leaving.saved_to_end(self.iteration))
                self._leave(leaving.sealed_to_move(self.iteration))
            loss, inputs = self._calls.run(
                self._parts.iterations.run, self.iteration, given, return_outputs=return_outputs
            )
            self.iteration += 1
            if self._progress is not None:
                self._progress.finished(self.iteration)
            if self._word is not None:
                self._word.finished(self.iteration)
            iterations = self._parts.iterations
            self._saving.synchronized = iterations.synchronizes
            if iterations.leaving or iterations.moving or leaving.moving:
                leaving.hear()
            self._mark()
        return (loss, join(inputs.outputs)) if return_outputs else loss

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

        Call it on every rank, at any time between two steps and also before the first one. It
        is no iteration: ``.grad``, the plan and all measurements stay as they are. Modules run in
        the mode that they are in, so call ``module.eval()`` first, and ``module.train()`` after.

        Arguments, results and errors are those of :meth:`step`; the batch may have another size.
        With ``return_outputs`` the target may be missing; then the loss is NaN.
        """
        self._ending.check_open("evaluate")
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, weight, evaluation=True)
        with self._ending.failing():
            self._calls.end_iteration(self.iteration, monotonic())
            loss, inputs = self._calls.run(
                self._parts.iterations.evaluate, self.iteration, given,
                return_outputs=return_outputs, needs_target=not return_outputs,
            )  # fmt: skip
            self._mark()
        return (loss, join(inputs.outputs)) if return_outputs else loss

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
        with self._ending.failing():
            parts.waiting.begin(
                f"the gradient norm of iteration {self.iteration - 1} of all stages"
            )
            norm = clip_grad_norm(
                parameters, max_norm, parts.world, parts.placements, parts.wait_for,
                uncounted=parts.tied.uncounted if parts.tied is not None else (),
            )  # fmt: skip
            parts.waiting.end()
        self._calls.met = True
        self._calls.last_activity = monotonic()
        return norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which :meth:`step` leaves gradients as they are on each replica, as in torch's
        ``DistributedDataParallel``: the next step outside averages their sum. Use it on all
        ranks. A checkpoint that is due is saved after that step."""
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
        with self._ending.failing():
            self._calls.end_iteration(self.iteration, monotonic())
            return self._saving.save(self._parts.checkpoints, self.iteration)

    def current_wait(self) -> str:
        """What this rank is waiting for, or why it failed, as text. Callable from any thread."""
        return self._ending.failure or self._parts.waiting.describe()

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks. Without one from the user it has ``pp`` and the dimensions with
        more than one rank."""
        return self._parts.world.mesh

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, which gets the arguments of :meth:`step`."""
        return self.coordinate.first

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.coordinate.last

    @property
    def split(self) -> str:
        """How this rank's only stage splits its backward: deferred, fused or emulated. Final
        after the first step. Raises :class:`InputError` if there are several, see
        :attr:`splits`."""
        return self._only("split", "splits", list(self.splits.values()))

    @property
    def splits(self) -> dict[int, str]:
        """How each stage of this rank splits its backward, as :attr:`split`."""
        return {stage: own.runner.split for stage, own in self._parts.stages.items()}

    @property
    def module(self) -> nn.Module:
        """The module of this rank's only stage. Raises :class:`InputError` if the stage is
        emulated, or if there are several, see :attr:`modules`."""
        return self._only("module", "modules", list(self.modules.values()))

    @property
    def modules(self) -> dict[int, nn.Module]:
        """The modules of this rank's stages. Raises :class:`InputError` if they are emulated."""
        found = {stage: own.module for stage, own in self._parts.stages.items()}
        return {stage: self._not_emulated(module) for stage, module in found.items()}

    def _not_emulated(self, module: nn.Module | None) -> nn.Module:
        if module is None:
            raise InputError(f"{self.coordinate}: the stage is emulated; it has no module")
        return module

    def _only(self, name: str, several: str, found: list[T]) -> T:
        if len(found) > 1:
            raise InputError(f"{self.coordinate}: {name} is for one stage; use {several}")
        return found[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was given. Raises :class:`InputError` if there is none."""
        if self._parts.optimizer is None:
            raise InputError(f"{self.coordinate}: Pipeline was given no optimizer")
        return self._parts.optimizer

    @property
    def state(self) -> State:
        """What was given as ``state``, or made by the function that was."""
        return self._parts.state

    @property
    def plan(self) -> RankPlan:
        """What this rank runs of the current plan."""
        return self._parts.plans.in_force

    def install(self, plan: Plan) -> None:
        """Prepare a plan on this rank, like one from a directive. When all stages of a pipeline
        have prepared it during iteration t, it runs on all of them from iteration t+1 on.

        Raises :class:`InputError` if it does not fit this job.
        """
        self._parts.iterations.arriving.install(plan)

    def close(self) -> None:
        """Wait for all ranks, end the connections, and release everything. Idempotent.

        After that, raises :class:`InputError` if the manifest has more iterations than were run:
        the job is not complete.
        """
        if self._ending.closed or self._ending.forked:
            return
        with self._ending.failing():
            self._keep()
            self._calls.end_iteration(self.iteration, self._calls.last_activity)
            self._saving.save_if_due(self.iteration)
            self._leave(self._leaving.saved_to_end(self.iteration))
            self._saving.finish_writing()
            self._parts.iterations.reports.finish()
            if self._word is not None:
                self._word.leave()
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
            self._ending.fail(error)
        else:
            self.close()

    # --- iterations, and the work between them --------------------------------------------------

    def _mark(self) -> None:
        leaving = self._leaving
        if self._saves:
            self._saving.mark(self.iteration, leaving=leaving.ending, moving=leaving.moving)

    def _keep(self) -> None:
        self._saving.keep(self.iteration, moving=self._leaving.moving)

    def _told(self, resumed: Resumed) -> str | None:
        """Tell where the state comes from. Returns the message of rank 0."""
        context = self.context
        if self.coordinate.rank != 0 or (resumed.iteration == 0 and context.generation == 0):
            return None
        if context.kept_dir is not None and context.generation > 0:
            log.info("%s", resumed)
        return str(resumed)

    def _word_of(self, resumed: Resumed) -> Word | None:
        context, keeper = self.context, self._parts.keeper
        if self.coordinate.rank != 0 or context.generation == 0 or context.kept_dir is None:
            return None
        counts_from = -1 if keeper is None else keeper.counts_from
        return Word(context.kept_dir, context.generation, resumed, counts_from)

    # --- taking down --------------------------------------------------------------------------

    def _leave(self, departure: Departure | None) -> None:
        """End this rank, as all do. Raises :class:`SystemExit`, so that the script's ``finally``
        and ``with`` run."""
        if departure is not None:
            self._saving.finish_writing()
            self._parts.iterations.reports.finish()
            self._ending.leave(departure)

    def _leave_traces(self) -> None:
        self._parts.leave_traces(self.iteration)

    def _release(self, goodbye: bool) -> None:
        self._parts.close(goodbye=goodbye, iterations=self.iteration)
        if self._progress is not None:
            self._progress.close()
        self._leaving.remove()
        sys.setswitchinterval(self._switch_interval)
