"""Hooks on Megatron-Core's pipeline schedules.

A forward includes its loss. With virtual stages no messages are recorded: the trace then has the
time that a rank waited before an op. Reductions within a step are gaps between ops.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
)
from pipemorph_trainer.observe.observation import MarkedOp, Observation, TimedCall
from pipemorph_trainer.observe.observed_rank import ObservedRank

_MESSAGES = {
    "tensor_send_next": FORWARD_SEND,
    "recv_prev": FORWARD_RECV,
    "tensor_send_prev": BACKWARD_SEND,
    "recv_next": BACKWARD_RECV,
}
"""Op type by the argument of the communicator that requests it."""
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
        for owner, name, add in (
            (schedules, "forward_step", hooks.add_forward),
            (schedules, "backward_step", hooks.add_backward),
            (getattr(communication, "P2PCommunicator", None), "_communicate",
             hooks.add_messages),
        )
        if not observation.time_calls(owner, name, add)
    ]  # fmt: skip
    observation.warn_lacks("Megatron-Core", lacks)


class _MegatronHooks:
    """Functions of the hooks on Megatron-Core."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._has_begun = False
        self._chunks: tuple[int, ...] = ()
        self._forwards: dict[int, tuple[int, int]] = {}
        """Microbatch and chunk by the id of the output, which Megatron holds until its backward."""

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Schedule of a step, whose arguments all have names."""
        observation = self._observation

        def step(*args: Any, **kwargs: Any) -> Any:
            if not observation.active:
                return original(*args, **kwargs)
            has_setup = not self._has_begun
            trains = not kwargs.get("forward_only", False)
            if trains:
                observation.guard(self._begin_step, original.__name__, kwargs)
            if has_setup or not trains:
                return observation.omit_call(original, *args, **kwargs)
            return original(*args, **kwargs)

        return step

    def _begin_step(self, schedule: str, arguments: dict[str, Any]) -> None:
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
        self._forwards.clear()
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
        """Add a forward, and remember whose output it gave."""
        microbatch = call.kwargs["current_microbatch"]
        chunk = self._chunks[call.kwargs.get("vp_stage") or 0]
        self._forwards[_identify_output(call.result[0])] = microbatch, chunk
        self._observation.add(MarkedOp(FORWARD, call.start, call.end, microbatch, chunk))

    def add_backward(self, call: TimedCall) -> None:
        """Add a backward, of the forward whose output it takes."""
        output = _identify_output(call.argument(1, "output_tensor"))
        microbatch, chunk = self._forwards.pop(output)
        self._observation.add(MarkedOp(BACKWARD, call.start, call.end, microbatch, chunk))

    def add_messages(self, call: TimedCall) -> None:
        """Add sends and receives, which are in the order of their microbatches."""
        if len(self._chunks) > 1:
            return
        for name, optype in _MESSAGES.items():
            # A tensor to send, or whether to receive.
            if call.kwargs.get(name) is not None and call.kwargs[name] is not False:
                self._observation.add(MarkedOp(optype, call.start, call.end))


def _identify_output(output: Any) -> int:
    return id(output[0] if isinstance(output, (list, tuple)) else output)
