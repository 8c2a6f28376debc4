"""Private parts of torch's pipelining that the adaptive schedule uses: only this module names them,
with a check of the installed torch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor

from pipemorph.planning.ir import StagePlacement
from pipemorph_trainer.executor.microbatch_costs import MicrobatchWork

_STAGE = {
    "forward_one_chunk": ("fwd_chunk_id", "args", "kwargs", "save_forward_output"),
    "backward_one_chunk": ("bwd_chunk_id", "loss", "full_backward"),
    "backward_weight_one_chunk": ("bwd_chunk_id",),
    "set_local_fwd_input": ("prev_stage_outputs", "mb_index"),
    "set_local_bwd_input": ("next_stage_bwd_outputs", "mb_index"),
    "get_local_bwd_output": ("mb_index",),
    "clear_runtime_states": (),
    "perform_reduce_grad": ("grad_scale_factor",),
}
_SCHEDULE = {
    "_initialize_stages": ("args", "kwargs", "target", "loss_kwargs"),
    "_check_inputs": ("arg_mbs", "kwarg_mbs", "target_mbs", "losses"),
    "_maybe_compute_loss": ("stage", "output", "target_mbs", "mb_index", "loss_kwargs"),
    "_maybe_get_loss": ("stage", "mb_index"),
    "_update_losses": ("stages", "losses"),
    "_step_microbatches": (
        "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs", "loss_kwargs",
    ),
}  # fmt: skip


def find_missing_features() -> str:
    """Return the first part that this torch lacks, in one line; empty if it lacks none."""
    for owner, wanted in ((PipelineStage, _STAGE), (PipelineScheduleMulti, _SCHEDULE)):
        for name, parameters in wanted.items():
            found = getattr(owner, name, None)
            if found is None:
                return f"{owner.__name__} has no {name}"
            has = inspect.signature(found).parameters
            lacks = [each for each in parameters if each not in has]
            if lacks:
                return f"{owner.__name__}.{name} has no parameter {lacks[0]}"
    return ""


def read_schedule_arguments(schedule: Any) -> dict[str, Any]:
    """Return the arguments of which a schedule was made, by name."""
    return {
        "stages": schedule._stages if hasattr(schedule, "_stages") else [schedule._stage],
        "n_microbatches": schedule._n_microbatches,
        "loss_fn": schedule._loss_fn,
        "args_chunk_spec": schedule._args_chunk_spec,
        "kwargs_chunk_spec": schedule._kwargs_chunk_spec,
        "output_merge_spec": schedule._output_merge_spec,
        "scale_grads": schedule.scale_grads,
    }


def find_placement(schedule: Any) -> StagePlacement:
    """Return the placement of several stages per rank in torch's schedule."""
    placed = getattr(schedule, "stage_index_to_group_rank", {})
    ranks = set(placed.values())
    if len(placed) == len(ranks):
        return "interleaved"
    v = generate_stage_to_rank_mapping(len(ranks), len(placed), style="v")
    return "v" if placed == v else "interleaved"


def place_stages(schedule: PipelineScheduleMulti, placement: str) -> None:
    """Set the rank of each stage on torch's stages, for their exchange of shapes."""
    style = "v" if placement == "v" else "loop"
    untyped: Any = schedule
    placed = generate_stage_to_rank_mapping(untyped.pp_group_size, untyped._num_stages, style=style)
    untyped.stage_index_to_group_rank = placed
    for stage in untyped._stages:
        stage.stage_index_to_group_rank = placed


def sort_results(schedule: PipelineScheduleMulti, work: MicrobatchWork) -> None:
    """Sort the losses and outputs of an iteration, which are by place, by microbatch."""
    untyped: Any = schedule
    for values in (untyped._internal_losses, *(each.output_chunks for each in untyped._stages)):
        values[:] = work.to_microbatches(values)


class TorchStageOps:
    """Ops of torch's stage, with tensors of this rank in and out."""

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage

    def run_forward(
        self, microbatch: int, args: Sequence[Any], kwargs: Any, *, keep_output: bool
    ) -> Any:
        """Run F. Returns the output of the module."""
        if not self._stage.is_first:
            self._stage.set_local_fwd_input(tuple(args), microbatch)
            args = ()
        return self._stage.forward_one_chunk(
            microbatch, tuple(args), dict(kwargs or {}), save_forward_output=keep_output
        )

    def run_backward(
        self, microbatch: int, grads: Sequence[Tensor | None] | None, loss: Tensor | None, *,
        whole: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Run B, and W in the same pass if ``whole``. Returns one gradient per input; none on the
        first stage."""
        stage = self._stage
        if grads is not None:
            stage.set_local_bwd_input(tuple(grads), microbatch)
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=whole)
        if stage.is_first:
            # No other stage reads it.
            stage.bwd_cache.pop(microbatch, None)
            return ()
        found = stage.get_local_bwd_output(microbatch)  # type: ignore[no-untyped-call]
        return tuple(to_local_tensor(grad) for grad in found)

    def run_backward_weight(self, microbatch: int) -> None:
        """Run W."""
        self._stage.backward_weight_one_chunk(microbatch)

    def gather_parameters(self) -> None:
        """Gather the parameters that FSDP2 shards, concurrently."""
        shards = [each for each in self._stage.submod.modules() if isinstance(each, FSDPModule)]
        waiting = [each.unshard(async_op=True) for each in shards]
        for handle in waiting:
            if handle is not None:
                handle.wait()

    def reduce_gradients(self, scale: int) -> None:
        """Divide gradients by ``scale``, after FSDP2 has reduced them and sharded its parameters
        again."""
        self._stage.perform_reduce_grad(scale)

    def discard_microbatches(self) -> None:
        """Drop all microbatches."""
        self._stage.clear_runtime_states()
        self._stage.bwd_cache.clear()
        self._stage.dw_runner.clear()


def to_local_tensor(value: Any) -> Any:
    """Return the rank's own part of a DTensor, and other values unchanged."""
    if isinstance(value, DTensor):
        return value.to_local()
    return value
