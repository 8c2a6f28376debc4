"""Hooks on the instructions of DeepSpeed's ``PipelineEngine``.

The last stage's forward includes its loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    DATA,
    EMBEDDING_REDUCE,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    REDUCE_SCATTER,
)
from pipemorph_trainer.observe.observation import MarkedOp, Observation, TimedCall
from pipemorph_trainer.observe.observed_rank import ObservedRank

_OPTYPES = {
    "LoadMicroBatch": DATA,
    "ForwardPass": FORWARD,
    "BackwardPass": BACKWARD,
    "SendActivation": FORWARD_SEND,
    "RecvActivation": FORWARD_RECV,
    "SendGrad": BACKWARD_SEND,
    "RecvGrad": BACKWARD_RECV,
    "ReduceGrads": REDUCE_SCATTER,
    "ReduceTiedGrads": EMBEDDING_REDUCE,
}
_WITHOUT_MICROBATCH = (DATA, REDUCE_SCATTER, EMBEDDING_REDUCE)


def hook_deepspeed(observation: Observation, engine: Any) -> None:
    """Hook the module ``deepspeed.runtime.pipe.engine``."""
    hooks = _EngineHooks(observation)
    observation.replace(engine.PipelineEngine, "train_batch", hooks.wrap_step)
    observation.replace(engine.PipelineEngine, "eval_batch", hooks.wrap_evaluation)
    instructions: dict[Any, Any] = getattr(engine.PipelineEngine, "_INSTRUCTION_MAP", {})
    original = dict(instructions)
    for instruction, method in original.items():
        optype = _OPTYPES.get(instruction.__name__)
        if optype is not None:
            add = hooks.count_ops(optype)
            instructions[instruction] = observation.make_timed(method, add)
        elif instruction.__name__ == "OptimizerStep":
            instructions[instruction] = hooks.wrap_optimizer(method)
    observation.call_at_stop(lambda: instructions.update(original))
    for name in ("send", "recv"):
        observation.replace(getattr(engine, "p2p", None), name, hooks.count_bytes)
    names = {instruction.__name__ for instruction in original}
    observation.warn_lacks("DeepSpeed", sorted({*_OPTYPES, "OptimizerStep"} - names))


class _EngineHooks:
    """Functions of the hooks on the engine."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._has_begun = False
        self._stage = 0
        self._counts: Counter[str] = Counter()
        """Instructions of each op type in this step: in the order of microbatches."""
        self._bytes = 0
        """Bytes of the tensors that this instruction has sent or received."""

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``train_batch``, which is a training step."""
        return self._observation.make_step(
            original,
            lambda *_, **__: (True, not self._has_begun),
            lambda args, _: self._begin_step(args[0]),
        )

    def wrap_evaluation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``eval_batch``, of which nothing is recorded."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            return self._observation.omit_call(original, *args, **kwargs)

        return evaluate

    def wrap_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``OptimizerStep``, in which an optimizer of torch may step."""
        observation = self._observation

        def step(*args: Any, **kwargs: Any) -> Any:
            if not observation.active:
                return original(*args, **kwargs)
            observation.guard(observation.begin_optimizer)
            result = original(*args, **kwargs)
            observation.guard(observation.end_optimizer)
            return result

        return step

    def _begin_step(self, engine: Any) -> None:
        self._counts.clear()
        self._bytes = 0
        self._stage = engine.stage_id
        import torch.distributed as dist

        grid = engine.grid
        place = ObservedRank(
            engine.global_rank, engine.stage_id, grid.get_data_parallel_id(), (engine.stage_id,),
            records=grid.get_slice_parallel_rank() == 0, ranks=engine.num_stages,
            replicas=grid.get_data_parallel_world_size(), backend=dist.get_backend(),
            schedule=f"deepspeed {type(engine).__name__}",
        )  # fmt: skip
        self._observation.set_place(place)
        if getattr(engine.device, "type", "cpu") == "cuda":
            self._observation.use_device(engine.device)
        # An optimizer ends each step.
        self._observation.begin_call(engine.micro_batches, 0, has_setup=not self._has_begun)
        self._has_begun = True

    def count_ops(self, optype: str) -> Callable[[TimedCall], None]:
        """Return the hook that adds the ops of a type."""

        def add(call: TimedCall) -> None:
            number = -1 if optype in _WITHOUT_MICROBATCH else self._counts[optype]
            self._counts[optype] += 1
            size, self._bytes = self._bytes or -1, 0
            op = MarkedOp(optype, call.start, call.end, number, self._stage, bytes=size)
            self._observation.add(op)

        return add

    def count_bytes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``send`` or ``recv`` of a tensor, its first argument."""

        def transfer(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._bytes += getattr(args[0] if args else None, "nbytes", 0)
            return result

        return transfer
