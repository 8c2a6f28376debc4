"""Adaptive schedule of torch's pipelining: PipeMorph's executor over torch's own stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Never, get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from pipemorph.errors import InputError
from pipemorph.planning import Plan, Policy
from pipemorph.planning.ir import StagePlacement
from pipemorph_trainer.backward import Mode
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.executor.local_stage import find_cuda_graph_refusal, parse_split_mode
from pipemorph_trainer.executor.microbatch_costs import MicrobatchWork
from pipemorph_trainer.executor.op_runner import ExternalStage
from pipemorph_trainer.pipeline import Pipeline
from pipemorph_trainer.settings import Options, refuse_unknown
from pipemorph_trainer.torch.pipelining_internals import (
    TorchStageOps,
    find_missing_features,
    find_placement,
    place_stages,
    read_schedule_arguments,
    sort_results,
)
from pipemorph_trainer.torch.split_backward import SplitBackward
from pipemorph_trainer.torch.stage_runner import TorchStageRunner
from pipemorph_trainer.trackers.listeners import OnIteration

Distributed = (DistributedDataParallel, FullyShardedDataParallel)
UNSUPPORTED = (
    "this version of torch is not supported by AdaptiveSchedule: {}; use one of torch's schedules "
    "with split_backward, or another torch"
)


class AdaptiveSchedule(PipelineScheduleMulti):
    """Pipeline schedule of torch, whose order, links and routes adapt while it runs.

    :meth:`step` and :meth:`eval` have the arguments and results of torch's own schedules; losses
    and gradients are those of ``Schedule1F1B``, to the bit. torch's stages compute, with FSDP2
    inside if the module has it; PipeMorph decides the order of ops, and moves activations and
    gradients, also in :meth:`eval`. Make it on all ranks at the same time; :meth:`close` it, or use
    it in ``with``.

    torch's own transport runs once, when the stages exchange shapes before the first step, and once
    more if that follows an :meth:`eval`.

    Args:
        stages: the stage of this rank, or a list of its stages in order.
        placement: with several stages per rank, how they are placed: ``interleaved``, or ``v`` as
            for torch's ``ScheduleZBVZeroBubble``.
        n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads:
            as of torch's schedules. Without ``loss_fn`` :meth:`step` evaluates. ``scale_grads``
            divides all that is in ``.grad`` by the number of microbatches at the end of each step,
            also what was there before: to add up several steps, give False and divide the loss.
        split: ``auto``: B and W run apart (see
            :func:`~pipemorph_trainer.torch.split_backward`), or as the stage's own ``dw_builder``
            does it. ``verify``: also compare each gradient that waits. ``fused``: B is the whole
            backward.
        mesh: all ranks, by the dimensions that :class:`pipemorph_trainer.Pipeline` knows; needed
            where other dimensions than replicas divide the ranks of a stage. The stages of ranks
            that share all but ``pp`` form a pipeline. Ranks of one stage run the same ops in the
            same order.
        context: identity of this rank; default: :meth:`TrainerContext.from_env`.
        policy, plan, deadline_seconds, on_iteration, options: as of
            :class:`pipemorph_trainer.Pipeline`.

    Raises :class:`InputError` on all ranks if the ranks, the job and the stages do not fit, and on
    this one if the installed torch lacks something that is used.
    """

    def __init__(  # noqa: PLR0917  torch's order
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        *,
        split: Mode = "auto",
        placement: StagePlacement = "interleaved",
        mesh: DeviceMesh | None = None,
        context: TrainerContext | None = None,
        policy: Policy | str | None = None,
        plan: Plan | None = None,
        deadline_seconds: float | None = None,
        on_iteration: OnIteration | Sequence[OnIteration] | None = None,
        options: Options | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown("AdaptiveSchedule", unknown)
        if why := find_missing_features():
            raise InputError(UNSUPPORTED.format(why))
        if isinstance(stages, PipelineStage):
            stages = [stages]
        if not stages or not all(isinstance(stage, PipelineStage) for stage in stages):
            kinds = ", ".join(type(stage).__name__ for stage in stages) or "none"
            raise InputError(f"stages are: {kinds}; expected PipelineStages")
        if placement not in get_args(StagePlacement):
            expected = " or ".join(get_args(StagePlacement))
            raise InputError(f"placement is {placement!r}; expected {expected}")
        mode = parse_split_mode(split)
        super().__init__(
            list(stages),
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        place_stages(self, placement)
        self._splits: list[SplitBackward] = []
        for stage in stages:
            if wrapped := [m for m in stage.submod.modules() if isinstance(m, Distributed)]:
                raise InputError(
                    f"the stage has a {type(wrapped[0]).__name__}, which reduces gradients in its"
                    " own backward; use fully_shard, or average gradients after step()"
                )
            if stage.device.type == "cuda" and (why := find_cuda_graph_refusal(stage.submod)):
                raise InputError(why)
            if mode != "fused" and stage.dw_builder is None:
                stage.dw_builder = SplitBackward(stage.submod, verify=mode == "verify")
                self._splits.append(stage.dw_builder)
        self._loss_kwargs: dict[str, Any] | None = None
        self._costs: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None

        # Not typed in torch.
        untyped: Any = self
        self._make_loss, self._kept_loss = untyped._maybe_compute_loss, untyped._maybe_get_loss
        self._update = untyped._update_losses

        def loss_of(stage: PipelineStage, output: Any, place: int, target: Any) -> None:
            self._make_loss(stage, output, {place: target}, place, self._loss_kwargs)

        self._runners = [
            TorchStageRunner(
                TorchStageOps(stage),
                splits=mode != "fused",
                walk=builder.exclude_shared_parameters
                if isinstance(builder := stage.dw_builder, SplitBackward)
                else None,
                loss_of=partial(loss_of, stage) if stage.is_last else None,
                loss_kept=partial(self._kept_loss, stage),
            )
            for stage in stages
        ]
        self.pipeline = Pipeline(
            [
                ExternalStage(runner, stage.device, stage.stage_index, stage.num_stages)
                for runner, stage in zip(self._runners, stages, strict=True)
            ],
            context=context or TrainerContext.from_env(),
            microbatches=n_microbatches,
            mesh=mesh,
            stages=stages[0].num_stages,
            stages_per_rank=len(stages),
            placement=placement,
            policy=policy,
            plan=plan,
            deadline_seconds=deadline_seconds,
            on_iteration=on_iteration,
            options=options,
        )
        """Pipeline below, for its ``plan``, ``iteration`` and ``install_plan``."""

    @staticmethod
    def from_schedule(
        schedule: PipelineScheduleSingle | PipelineScheduleMulti, **options: Any
    ) -> AdaptiveSchedule:
        """Replace a schedule that a trainer has made but not run; the new one has its stages, their
        placement and its arguments. ``options``: the keyword-only arguments of this class."""
        if why := find_missing_features():
            raise InputError(UNSUPPORTED.format(why))
        options = {"placement": find_placement(schedule), **options}
        return AdaptiveSchedule(**read_schedule_arguments(schedule), **options)

    def step(
        self,
        *args: Any,
        costs: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one iteration with the arguments of torch's own schedules. ``costs``: of the
        microbatches, on stage 0, as of :meth:`pipemorph_trainer.Pipeline.step`."""
        self._costs = costs
        try:
            return super().step(*args, **kwargs)
        finally:
            self._costs = None

    def close(self) -> None:
        """Wait for all ranks, and end the connections. Idempotent."""
        self.pipeline.close()
        self._close_splits()

    def _close_splits(self) -> None:
        for each in self._splits:
            each.close()

    def __enter__(self) -> AdaptiveSchedule:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.pipeline.__exit__(kind, error, traceback)
        self._close_splits()

    def _step_microbatches(  # noqa: PLR0917  torch's order
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        if self._has_backward or not self._stages_forward_initialized:
            target = target_mbs[0] if target_mbs is not None else None
            self._initialize_stages(arg_mbs[0], kwarg_mbs[0], target, loss_kwargs)
        self._loss_kwargs = loss_kwargs
        for runner in self._runners:
            runner.keeps_output = return_outputs
            runner.evaluating = not self._has_backward
        if self._has_backward:
            self.pipeline.step(
                arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs, costs=self._costs
            )
            sort_results(self, MicrobatchWork(order=self.pipeline.microbatch_order))
            scale = self._n_microbatches if self.scale_grads else 1
            for runner in self._runners:
                runner.end_iteration(scale if self._finalize_gradients else None)
        else:
            self.pipeline.evaluate(arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs)
        self._update(self._stages, losses)
