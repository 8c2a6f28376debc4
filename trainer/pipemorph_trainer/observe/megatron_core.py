"""Hooks on Megatron-Core's pipeline schedules.

A forward includes its loss. A message has the chunk and microbatch of the op that made or takes its
tensor. A receive that is waited for later has its posting, and the wait, from its handle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from time import perf_counter
from typing import Any, NamedTuple

from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    EMBEDDING_REDUCE,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    REDUCE_SCATTER,
)
from pipemorph_trainer.observe.observation import MarkedOp, Observation, TimedCall
from pipemorph_trainer.observe.observed_rank import ObservedRank

_SENDS = (("tensor_send_next", FORWARD_SEND), ("tensor_send_prev", BACKWARD_SEND))
"""Op type by the communicator's argument with the tensor."""
_RECEIVES = (("recv_prev", FORWARD_RECV), ("recv_next", BACKWARD_RECV))
"""Op type by the name of the handle, in the order of the communicator's results."""
_DISTRIBUTED = "megatron.core.distributed"
_STEPS = (
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def hook_megatron(observation: Observation, schedules: Any) -> None:
    """Hook the module ``megatron.core.pipeline_parallel.schedules``."""
    communication = import_module("megatron.core.pipeline_parallel.p2p_communication")
    hooks = _MegatronHooks(observation)
    for name in _STEPS:
        observation.replace(schedules, name, hooks.wrap_step)
    lacks = [
        name
        for name, add in (
            ("forward_step", hooks.add_forward),
            ("backward_step", hooks.add_backward),
        )
        if not observation.time_calls(schedules, name, add)
    ]
    communicator = getattr(communication, "P2PCommunicator", None)
    if not observation.time_calls(communicator, "_communicate", hooks.add_messages):
        lacks.append("_communicate")
    observation.warn_lacks("Megatron-Core", lacks)


class _Receive:
    """Receive whose tensor no op has taken yet. Times are marks."""

    def __init__(self, optype: str, tensor: Any, posted: Any, end: Any) -> None:
        self.optype = optype
        self.tensor = tensor
        self.posted = self.waited = posted
        self.end = end


class _Handle:
    """Handle of a message in place of Megatron's own, which it waits for."""

    def __init__(self, observation: Observation, handle: Any, receive: _Receive) -> None:
        self._observation = observation
        self._handle = handle
        self._receive = receive

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        receive, mark = self._receive, self._observation.mark
        if not self._observation.active:
            return self._handle.wait(*args, **kwargs)
        receive.waited = mark()
        result = self._handle.wait(*args, **kwargs)
        receive.end = mark()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class _Taken(NamedTuple):
    """Microbatch and chunk of an op."""

    microbatch: int
    chunk: int


class _MegatronHooks:
    """Functions of the hooks on Megatron-Core."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._has_begun = False
        self._chunks: tuple[int, ...] = ()
        self._models: Sequence[Any] = ()
        self._made: dict[int, _Taken] = {}
        """Op by the id of its output or of its input's gradient, which Megatron holds until it is
        sent; an output until its backward."""
        self._launched: dict[int, tuple[float, Any]] = {}
        """Time and mark of the newest launch by the id of a group of buckets."""
        self._receives: dict[int, _Receive] = {}
        """Receives by the id of their tensor, which they hold."""

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Schedule of a step, whose arguments all have names."""
        return self._observation.make_step(
            original,
            lambda *_, forward_only=False, **__: (not forward_only, not self._has_begun),
            lambda _, kwargs: self._begin_step(original.__name__, kwargs),
        )

    def _begin_step(self, schedule: str, arguments: Mapping[str, Any]) -> None:
        parallel_state = import_module("megatron.core.parallel_state")
        models = arguments["model"]
        models = models if isinstance(models, list) else [models]
        stage = parallel_state.get_pipeline_model_parallel_rank()
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        shards = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
        self._chunks = tuple(stage + stages * k for k in range(len(models)))
        self._models = models
        if not self._has_begun:
            # When the schedules are imported, these modules may be half imported themselves.
            self._hook_reductions()
        self._made.clear()
        self._receives.clear()
        self._launched.clear()
        import torch.distributed as dist

        replica = parallel_state.get_data_parallel_rank()
        self._observation.set_place(
            ObservedRank(
                dist.get_rank(), stage, replica, self._chunks, records=not any(shards),
                ranks=stages, replicas=parallel_state.get_data_parallel_world_size(),
                backend=dist.get_backend(), schedule=f"megatron-core {schedule}",
            )
        )  # fmt: skip
        parameter = next((p for model in models for p in model.parameters()), None)
        if parameter is not None and parameter.device.type == "cuda":
            self._observation.use_device(parameter.device)
        version = 0 if parameter is None else parameter._version
        count = int(arguments["num_microbatches"])
        self._observation.begin_call(count, version, has_setup=not self._has_begun)
        self._has_begun = True

    def add_forward(self, call: TimedCall) -> None:
        """Add a forward and the receive of its input, and remember whose output it gave."""
        microbatch = call.kwargs["current_microbatch"]
        chunk = self._chunks[call.kwargs.get("vp_stage") or 0]
        op = _Taken(microbatch, chunk)
        self._made[_identify_tensor(call.result[0])] = op
        self._add_receive(call.argument(4, "input_tensor"), op)
        self._observation.add(MarkedOp(FORWARD, call.start, call.end, *op))

    def add_backward(self, call: TimedCall) -> None:
        """Add a backward, of the forward whose output it takes, and the receive of its gradient."""
        op = self._made.pop(_identify_tensor(call.argument(1, "output_tensor")))
        self._made[_identify_tensor(call.result)] = op
        self._add_receive(call.argument(2, "output_tensor_grad"), op)
        self._observation.add(MarkedOp(BACKWARD, call.start, call.end, *op))

    def _add_receive(self, tensor: Any, op: _Taken) -> None:
        receive = self._receives.pop(_identify_tensor(tensor), None)
        if receive is not None:
            posted, end = receive.posted, receive.end
            self._observation.add(
                MarkedOp(
                    receive.optype,
                    posted,
                    end,
                    *op,
                    posted,
                    receive.waited,
                    _count_bytes(receive.tensor),
                )
            )

    def add_messages(self, call: TimedCall) -> None:
        """Add a call of ``_communicate``, which sends and receives tensors whose arguments all have
        names. If it does not wait, it returns handles by name."""
        start, end, result, arguments = call.start, call.end, call.result, call.kwargs
        for name, optype in _SENDS:
            tensor = arguments[name]
            op = self._made.get(_identify_tensor(tensor))
            if tensor is not None and op is not None:
                size = _count_bytes(tensor)
                self._observation.add(MarkedOp(optype, start, end, *op, bytes=size))
        for (name, optype), tensor in zip(_RECEIVES, result, strict=False):
            if tensor is None:
                continue
            receive = _Receive(optype, tensor, start, end)
            self._receives[id(tensor)] = receive
            if isinstance(result[-1], dict) and name in result[-1]:
                result[-1][name] = _Handle(self._observation, result[-1][name], receive)

    def _hook_reductions(self) -> None:
        """Hook the reductions over replicas, in the calls that wait for them, and of tied
        embeddings, if their modules are used."""
        replicas = sys.modules.get(f"{_DISTRIBUTED}.distributed_data_parallel")
        buffers = sys.modules.get(f"{_DISTRIBUTED}.param_and_grad_buffer")
        others = sys.modules.get(f"{_DISTRIBUTED}.finalize_model_grads")
        lacks = [
            name
            for owner, name, add in (
                (replicas and replicas.DistributedDataParallel, "finish_grad_sync",
                 self._add_reduction),
                (buffers and getattr(buffers, "_ParamAndGradBucketGroup", buffers),
                 "start_grad_sync", self._note_launch),
                (others, "_allreduce_word_embedding_grads", self._add_embedding),
            )
            if owner is not None and not self._observation.time_calls(owner, name, add)
        ]  # fmt: skip
        self._observation.warn_lacks("Megatron-Core", lacks)

    def _note_launch(self, call: TimedCall) -> None:
        self._launched[id(call.args[0])] = perf_counter(), call.start

    def _add_reduction(self, call: TimedCall) -> None:
        """Add the reduction of a chunk's gradients. It begins when its last bucket is launched,
        which with ``overlap_grad_reduce`` is within a backward."""
        launched = [
            self._launched[id(group)]
            for group in getattr(call.args[0], "bucket_groups", ())
            if id(group) in self._launched
        ]
        overlaps = getattr(call.args[0].ddp_config, "overlap_grad_reduce", False)
        _, start = max(launched) if launched and overlaps else (0.0, call.start)
        for chunk, model in zip(self._chunks, self._models, strict=False):
            if model is call.args[0]:
                self._observation.add(MarkedOp(REDUCE_SCATTER, start, call.end, stage=chunk))

    def _add_embedding(self, call: TimedCall) -> None:
        """Add the reduction of tied embeddings. Ranks without them call this as well."""
        parallel_state = import_module("megatron.core.parallel_state")
        has_several = parallel_state.get_pipeline_model_parallel_world_size() > 1
        if has_several and parallel_state.is_rank_in_embedding_group() and _has_tied(call.args[0]):
            self._observation.add(MarkedOp(EMBEDDING_REDUCE, call.start, call.end))


def _has_tied(models: Sequence[Any]) -> bool:
    """True if input and output layers share a weight."""
    model = models[0]
    while hasattr(model, "module"):
        model = model.module
    return bool(getattr(model, "share_embeddings_and_output_weights", False))


def _count_bytes(tensor: Any) -> int:
    return sum(each.nbytes for each in (tensor if isinstance(tensor, (list, tuple)) else [tensor]))


def _identify_tensor(tensor: Any) -> int:
    return id(tensor[0] if isinstance(tensor, (list, tuple)) else tensor)
