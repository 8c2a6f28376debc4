"""Hooks on torch's pipelines, its optimizers and its data loader.

Ids and times of ops are from the methods of ``PipelineStage`` that schedules call, by names without
an underscore. Waits for messages are from two private functions of torch's schedules, and the loss
from a private method: without one of them a line says what the recording lacks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    LOSS,
    REDUCE_SCATTER,
    WEIGHT,
)
from pipemorph_trainer.observe.observation import MarkedOp, Observation, TimedCall
from pipemorph_trainer.observe.observed_rank import ObservedRank

_log = logging.getLogger("pipemorph_trainer.observe")

_MESSAGES = {
    "get_fwd_recv_ops": FORWARD_RECV,
    "get_fwd_send_ops": FORWARD_SEND,
    "get_bwd_recv_ops": BACKWARD_RECV,
    "get_bwd_send_ops": BACKWARD_SEND,
}
_SENDS = (FORWARD_SEND, BACKWARD_SEND)
_REDUCTIONS = ("perform_reduce_grad", "start_gradient_reduction", "wait_for_gradient_reduction")


class _Message(NamedTuple):
    """Message of a P2POp, one tensor, or of its work with the mark at which it was posted."""

    optype: str
    microbatch: int
    stage: int
    bytes: int
    posted: Any = None


def hook_schedules(observation: Observation, schedules: Any) -> None:
    """Hook the module ``torch.distributed.pipelining.schedules``."""
    hooks = ScheduleHooks(observation)
    stage = schedules._PipelineStageBase
    for owner in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        observation.replace(owner, "step", hooks.wrap_step)
    observation.replace(stage, "backward_one_chunk", hooks.wrap_backward)
    lacks = [
        name
        for owner, name, add in (
            (stage, "forward_one_chunk", hooks.add_forward),
            (stage, "backward_one_chunk", hooks.add_backward),
            (stage, "backward_weight_one_chunk", hooks.add_weight),
            (schedules._PipelineSchedule, "_maybe_compute_loss", hooks.add_loss),
            (schedules, "_batch_p2p", hooks.note_posted),
        )
        if not observation.time_calls(owner, name, add)
    ]
    for name, optype in _MESSAGES.items():
        observation.time_calls(stage, name, hooks.tag_messages(optype))
    for name in _REDUCTIONS:
        observation.time_calls(stage, name, hooks.add_reduction)
    if not observation.replace(schedules, "_wait_batch_p2p", hooks.wrap_wait):
        lacks.append("_wait_batch_p2p")
    observation.warn_lacks("torch.distributed.pipelining", lacks)


class ScheduleHooks:
    """Functions of the hooks on schedules and stages."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._begun: WeakSet[Any] = WeakSet()
        """Schedules that have had their first step, which exchanges shapes."""
        self._posted: dict[int, list[_Message]] = {}
        """Messages by the id of their work, which the schedule holds until it has waited for it."""
        self._last_gradient: Any = None
        """Mark at the last gradient of a parameter in a backward that reduces."""

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` of a schedule, which ``eval`` calls as well."""
        return self._observation.make_step(
            original,
            lambda schedule, *_, **__: (schedule._has_backward, schedule not in self._begun),
            lambda args, _: self._begin_step(args[0]),
        )

    def _begin_step(self, schedule: Any) -> None:
        stages = _list_stages(schedule)
        has_setup = schedule not in self._begun
        self._begun.add(schedule)
        self._posted.clear()
        if has_setup:
            _check_classes(stages)
        self._observation.set_place(_find_place(stages, type(schedule).__name__))
        if stages[0].device.type == "cuda":
            self._observation.use_device(stages[0].device)
        parameter = next((p for stage in stages for p in stage.submod.parameters()), None)
        version = 0 if parameter is None else parameter._version
        self._observation.begin_call(schedule._n_microbatches, version, has_setup=has_setup)

    def add_forward(self, call: TimedCall) -> None:
        """Add a forward. The loss is apart."""
        self._add(FORWARD, call, call.argument(1, "fwd_chunk_id"))

    def add_backward(self, call: TimedCall) -> None:
        """Add a backward, or the gradient of a stage's input. Without a ``dw_builder``, stage 0 has
        no such gradient: its whole backward is in :meth:`add_weight`. DDP reduces at the end of the
        last backward."""
        ready, self._last_gradient = self._last_gradient, None
        if ready is not None:
            self._add(REDUCE_SCATTER, call._replace(start=ready), -1)
            call = call._replace(end=ready)
        if call.argument(3, "full_backward", True) or not _is_whole_in_weight(call.args[0]):
            self._add(BACKWARD, call, call.argument(1, "bwd_chunk_id"))

    def wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``backward_one_chunk``. In the last one, DDP's reducer waits for all reductions at its
        end, and launches the last of them after the last gradient of a parameter."""
        observation = self._observation

        def backward(stage: Any, *args: Any, **kwargs: Any) -> Any:
            is_last = kwargs.get("last_backward", args[3] if len(args) > 3 else False)
            if not is_last or not observation.active or observation.omits:
                return original(stage, *args, **kwargs)
            hooks: list[Any] = []
            observation.guard(self._watch_gradients, stage.submod, hooks)
            try:
                return original(stage, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()

        return backward

    def _watch_gradients(self, module: Any, hooks: list[Any]) -> None:
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(module, DistributedDataParallel):
            parameters: list[Any] = [p for p in module.parameters() if p.requires_grad]
            for parameter in parameters:
                hooks.append(parameter.register_post_accumulate_grad_hook(self._note_gradient))

    def _note_gradient(self, _: Any) -> None:
        self._observation.guard(self._mark_gradient)

    def _mark_gradient(self) -> None:
        self._last_gradient = self._observation.mark()

    def add_weight(self, call: TimedCall) -> None:
        """Add the gradient of a stage's weights."""
        optype = BACKWARD if _is_whole_in_weight(call.args[0]) else WEIGHT
        self._add(optype, call, call.argument(1, "bwd_chunk_id"))

    def add_reduction(self, call: TimedCall) -> None:
        """Add the reduction of a stage's gradients over its replicas, if FSDP2 has it here."""
        if hasattr(call.args[0].submod, "set_requires_gradient_sync"):
            self._add(REDUCE_SCATTER, call, -1)

    def _add(self, optype: str, call: TimedCall, microbatch: int) -> None:
        stage = call.args[0].stage_index
        self._observation.add(MarkedOp(optype, call.start, call.end, microbatch, stage))

    def add_loss(self, call: TimedCall) -> None:
        """Add the loss of a microbatch. The schedule calls this for each stage."""
        stage = call.argument(1, "stage")
        if stage.is_last:
            microbatch = call.argument(4, "mb_index")
            op = MarkedOp(LOSS, call.start, call.end, microbatch, stage.stage_index)
            self._observation.add(op)

    def tag_messages(self, optype: str) -> Callable[[TimedCall], None]:
        """Return the hook that marks the messages of a microbatch."""

        def tag(call: TimedCall) -> None:
            microbatch = call.args[1] if len(call.args) > 1 else next(iter(call.kwargs.values()))
            for op in call.result:
                stage = call.args[0].stage_index
                op.pipemorph_message = _Message(optype, microbatch, stage, op.tensor.nbytes)

        return tag

    def note_posted(self, call: TimedCall) -> None:
        """Note the works of a batch of messages. On NCCL a batch may have one work for all."""
        works, messages = call.result, []
        for op in call.argument(0, "p2p_ops"):
            if (message := op.__dict__.pop("pipemorph_message", None)) is not None:
                # A batch of several groups is split: its parts come here before it.
                messages.append(message)
        for optype, microbatch, stage, size, _ in messages:
            if optype in _SENDS:
                self._observation.add(
                    MarkedOp(optype, call.start, call.end, microbatch, stage, bytes=size)
                )
        if len(works) != len(messages):
            works = works[-1:] * len(messages)
        for work, message in zip(works, messages, strict=False):
            if message.optype not in _SENDS:
                posted = message._replace(posted=call.start)
                self._posted.setdefault(id(work), []).append(posted)

    def wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wait for the works of a batch, one after the other, as the original does."""
        observation = self._observation

        def wait(work: Sequence[Any]) -> None:
            if not observation.active or not self._posted:
                original(work)
                return
            for each in work:
                messages = self._posted.pop(id(each), None)
                waited = observation.mark()
                original([each])
                if messages is not None:
                    observation.guard(self._add_receives, messages, waited)

        return wait

    def _add_receives(self, messages: Sequence[_Message], waited: Any) -> None:
        end = self._observation.mark()
        for optype, microbatch, stage, size, posted in messages:
            op = MarkedOp(optype, posted, end, microbatch, stage, posted, waited, size)
            self._observation.add(op)


def _is_whole_in_weight(stage: Any) -> bool:
    """True if torch computes a stage's whole backward where others have that of the weights."""
    return bool(stage.is_first) and getattr(stage, "dw_builder", None) is None


def _check_classes(stages: Sequence[Any]) -> None:
    """Log which ops escape the hooks, because a class of stages has a method of its own."""
    from torch.distributed.pipelining import schedules

    base: Any = schedules._PipelineStageBase  # type: ignore[attr-defined]
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        for kind in {type(stage) for stage in stages}:
            if getattr(kind, name) is not getattr(base, name):
                _log.warning(
                    "%s has a method %s of its own: what it runs is recorded only if it calls"
                    " PipelineStage's", kind.__name__, name,
                )  # fmt: skip


def _list_stages(schedule: Any) -> Sequence[Any]:
    stages: Sequence[Any] = getattr(schedule, "_stages", None) or [schedule._stage]
    return stages


def _find_place(stages: Sequence[Any], schedule: str) -> ObservedRank:
    """Place of this rank, by its pipeline's group: pipelines are numbered in the order of their
    ranks. Ranks that hold other shards of the same layers (TP) record nothing but rank 0 of them.
    """
    import torch.distributed as dist

    group = stages[0].group
    ranks = dist.get_process_group_ranks(group)
    first, stride = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
    replica = first // (stride * len(ranks)) * stride + first % stride
    shard, shards = _find_tensor_shard(stages[0].submod)
    framework = "torchtitan" if "torchtitan" in sys.modules else "torch"
    return ObservedRank(
        dist.get_rank(), stages[0].group_rank, replica // shards,
        tuple(stage.stage_index for stage in stages), records=shard == 0, ranks=len(ranks),
        replicas=dist.get_world_size() // (len(ranks) * shards), backend=dist.get_backend(group),
        schedule=f"{framework} {schedule}",
    )  # fmt: skip


def _find_tensor_shard(module: Any) -> tuple[int, int]:
    """Number of this rank's shard of the layers among those of TP, and of all."""
    for parameter in module.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            return mesh.get_local_rank("tp"), mesh.size(mesh.mesh_dim_names.index("tp"))
    return 0, 1


def hook_optimizers(observation: Observation, optimizer: Any) -> None:
    """Hook the steps of all optimizers, of the module ``torch.optim.optimizer``."""

    def guarded(function: Callable[[], None]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if observation.active:
                observation.guard(function)

        return hook

    before = optimizer.register_optimizer_step_pre_hook(guarded(observation.begin_optimizer))
    after = optimizer.register_optimizer_step_post_hook(guarded(observation.end_optimizer))
    observation.call_at_stop(before.remove)
    observation.call_at_stop(after.remove)


def hook_loaders(observation: Observation, dataloader: Any) -> None:
    """Hook the iterators of data loaders, of the module ``torch.utils.data.dataloader``."""
    iterator = getattr(dataloader, "_BaseDataLoaderIter", None)
    if not observation.time_calls(iterator, "__next__", observation.add_loading):
        observation.warn_lacks("torch.utils.data", ["_BaseDataLoaderIter"])
