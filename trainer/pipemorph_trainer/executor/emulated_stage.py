"""Emulated stages: their ops take the given times and compute nothing.

Each op holds the interpreter for exactly its time without using the CPU, like a stage whose kernels
keep a device busy. Tensors of a given size go through the same executor and transports as those of
a real stage. Outputs and records mark the stage as emulated.

The loss depends on every message: each message carries a number that each stage mixes with its own,
forward and backward, and the next iteration starts from the result. A message that is lost, used
twice or confused with another changes all later losses.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipemorph.spec.job_spec import JobSpec
from pipemorph_trainer.backward.gradient_form import notify_gradient_written
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.op_runner import Grads, OpRunner, Split

GRADIENT_PARTS = 8
"""Number of gradient buckets of an emulated stage."""
_MASK = (1 << 64) - 1
_TIMER_ABSTIME = 1
_PR_SET_TIMERSLACK = 29
_AT_ONCE_NS = 500_000
_MOST_OVER_NS = 2_000_000
_VALUE = struct.Struct("<Q")
# PyDLL keeps the interpreter locked during the call: no other Python thread runs.
_holding = ctypes.PyDLL(None)


class _SleepDeadline(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class EmulatedDevice:
    """Device of emulated ops: passes time while it holds the interpreter.

    The scheduler wakes a sleeping thread some tens of microseconds late, or more on a busy machine.
    The excess of an op is subtracted from the next op if that follows at once, so that consecutive
    ops take exactly the sum of their times.
    """

    def __init__(self) -> None:
        # The default slack of 50 µs is added to every sleep; 1 ns turns it off for this thread.
        _holding.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._ended = 0
        self._over = 0

    def hold_interpreter(self, seconds: float) -> None:
        """Hold the interpreter for ``seconds`` without using the CPU. Signals are handled."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        until = now + int(seconds * 1e9)
        if now - self._ended < _AT_ONCE_NS:
            until -= min(self._over, _MOST_OVER_NS)
        deadline = _SleepDeadline(until // 1_000_000_000, until % 1_000_000_000)
        while _holding.clock_nanosleep(
            time.CLOCK_MONOTONIC, _TIMER_ABSTIME, ctypes.byref(deadline), None
        ):
            pass
        self._ended = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._over = self._ended - until


def mix_bits(value: int, salt: int) -> int:
    """Apply a step of a 64-bit mixer: any change of the input changes about half of the bits."""
    value = (value ^ (salt * 0x9E3779B97F4A7C15)) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class EmulatedStage:
    """Emulated stage for a Pipeline: op times in seconds, and the bytes of each message.

    ``stands_for_bytes``: the message size of the emulated stage, if messages are scaled down.
    ``offload_copy``: seconds to copy a microbatch's activations one way; ``activation_bytes``:
    their reported size. ``input_bytes``: bytes stored to compute them again; None: it does not
    recompute. ``fused_backward``: seconds of BW, by default those of B and W. ``gradient_bytes``:
    bytes that replicas reduce; the last W makes them in equal parts; None: none.

    ``pipe.step(work=[…])`` on its rank multiplies the op times of each microbatch.
    """

    forward: float
    backward_input: float
    backward_weight: float
    message_bytes: int = 1 << 18
    stands_for_bytes: int | None = None
    offload_copy: float = 0.0
    activation_bytes: int | None = None
    fused_backward: float | None = None
    gradient_bytes: int | None = None
    input_bytes: int | None = None

    @staticmethod
    def from_spec(spec: JobSpec, *, stage: int, share: float = 1.0) -> EmulatedStage:
        """Make stage ``stage`` of a job with ``spec.emulation``. ``share``: its number of layers,
        divided by that for which the job states the times."""
        assert spec.emulation is not None
        times, emulation = spec.emulation.stage_times, spec.emulation
        mine = times[stage] if len(times) > 1 else times[0]

        def scale_bytes(nbytes: int | None) -> int | None:
            return None if nbytes is None else max(1, round(nbytes * share))

        return EmulatedStage(
            mine.forward * share / 1e3,
            mine.backward_input * share / 1e3,
            mine.backward_weight * share / 1e3,
            emulation.message_bytes,
            emulation.stands_for_bytes,
            mine.offload_copy * share / 1e3,
            scale_bytes(emulation.activation_bytes),
            None if mine.fused_backward is None else mine.fused_backward * share / 1e3,
            scale_bytes(emulation.gradient_bytes),
        )

    @property
    def whole_backward(self) -> float:
        """Seconds of a BW."""
        if self.fused_backward is not None:
            return self.fused_backward
        return self.backward_input + self.backward_weight


class EmulatedRunner(OpRunner):
    """Runner of an :class:`EmulatedStage`."""

    split: Split = "emulated"

    def __init__(
        self,
        emulated: EmulatedStage,
        stage: int,
        stages: int,
        replica: int,
        microbatches: int | None = None,
    ) -> None:
        """``microbatches``: N, with gradients to reduce after the last one."""
        self._times = emulated
        size = emulated.gradient_bytes or 0
        self.parameters = [
            torch.nn.Parameter(torch.zeros(max(1, size // GRADIENT_PARTS // 4)))
            for _ in range(GRADIENT_PARTS if size and microbatches is not None else 0)
        ]
        """Parameters whose gradients replicas reduce, in the order of their use."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._last_microbatch = None if microbatches is None else microbatches - 1
        self._accelerator = EmulatedDevice()
        self._stage = stage
        self._first, self._last = stage == 0, stage == stages - 1
        self._words = max(2, (emulated.message_bytes + 7) // 8)
        # Represents the weights: every backward changes it, forwards use it.
        self._state = mix_bits(replica + 1, stage + 1)
        self._gradient = 0
        self._held: dict[int, tuple[Any, ...]] = {}
        self._values: dict[int, int] = {}
        self._work: dict[int, float] = {}
        """Factor of the op times of each microbatch in flight; absent: 1."""
        self._away: set[int] = set()

    def begin_iteration(
        self,
        *,
        fused: Set[int],
        outputs: list[Any] | None = None,
        divisor: float | None = None,
        microbatches: int | None = None,
    ) -> None:
        if microbatches is not None and self._last_microbatch is not None:
            self._last_microbatch = microbatches - 1

    def read_state(self) -> int:
        """Return the stage's whole state, for a checkpoint."""
        return self._state

    def restore_state(self, state: int) -> None:
        self._state = state

    def run_forward(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        *,
        offload: bool = False,
        recompute: bool = False,
    ) -> tuple[Tensor, ...]:
        if recompute:
            self._away.add(microbatch)
        value = self._state if self._first else self._read_message(args[0])
        value = mix_bits(value, self._state + microbatch)
        self._held[microbatch] = tuple(args)  # Held until W, like activations.
        if kwargs:
            self._work[microbatch] = kwargs["work"]
        self._hold(self._times.forward, microbatch)
        if self._last:
            self._values[microbatch] = value
            return (torch.tensor((value >> 11) / (1 << 53), dtype=torch.float64),)
        return (self._make_message(value).requires_grad_(),)

    def evaluate_microbatch(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
    ) -> tuple[Tensor, ...]:
        outputs = self.run_forward(microbatch, args, kwargs, target)
        self.discard_microbatches()
        return tuple(output.detach() for output in outputs)

    def discard_microbatches(self) -> None:
        self._held.clear()
        self._work.clear()
        self._values.clear()
        self._away.clear()

    def offload_activations(self, microbatch: int) -> int:
        """Let the time of a copy pass. No data moves."""
        self._accelerator.hold_interpreter(self._times.offload_copy)
        self._away.add(microbatch)
        return self._times.activation_bytes or 0

    def fetch_activations(self, microbatch: int) -> int:
        self._accelerator.hold_interpreter(self._times.offload_copy)
        self._away.remove(microbatch)
        return self._times.activation_bytes or 0

    def recompute_forward(self, microbatch: int) -> None:
        """Let the time of a forward pass."""
        self._hold(self._times.forward, microbatch)
        self._away.remove(microbatch)

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        self._hold(self._times.backward_input, microbatch)
        return self._finish_backward(microbatch, output_grads)

    def backward_weight(self, microbatch: int) -> None:
        self._hold_backward(self._times.backward_weight, microbatch)
        self._drop_microbatch(microbatch)

    def _hold(self, seconds: float, microbatch: int) -> None:
        """Let the time of a microbatch's op pass, of ``seconds`` for the work 1."""
        self._accelerator.hold_interpreter(seconds * self._work.get(microbatch, 1.0))

    def _drop_microbatch(self, microbatch: int) -> None:
        del self._held[microbatch]
        self._work.pop(microbatch, None)

    def _hold_backward(self, seconds: float, microbatch: int) -> None:
        """Let the time of a W or BW pass; that of the last microbatch writes gradients."""
        if microbatch != self._last_microbatch or not self.parameters:
            self._hold(seconds, microbatch)
            return
        for parameter in reversed(self.parameters):
            self._hold(seconds / len(self.parameters), microbatch)
            notify_gradient_written(parameter)

    def run_fused_backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        self._hold_backward(self._times.whole_backward, microbatch)
        result = self._finish_backward(microbatch, output_grads)
        self._drop_microbatch(microbatch)
        return result

    def _finish_backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None
    ) -> Grads:
        if microbatch in self._away:
            raise PipelineError(
                f"stage {self._stage}: the backward of microbatch {microbatch} came before its"
                " activations came from host memory or its forward ran again"
            )
        if self._last:
            value = self._values.pop(microbatch)
        else:
            assert output_grads is not None and output_grads[0] is not None
            value = self._read_message(output_grads[0])
            self._held[microbatch] += tuple(output_grads)
        value = mix_bits(value, self._stage + 1)
        self._gradient = mix_bits(self._gradient ^ value, microbatch) if microbatch else value
        return () if self._first else (self._make_message(value),)

    def update_state(self) -> None:
        """Emulate the optimizer step: later forwards depend on this iteration."""
        self._state = mix_bits(self._state, self._gradient)

    def _make_message(self, value: int) -> Tensor:
        message = torch.empty(self._words, dtype=torch.float64)
        view = message.numpy().data.cast("B")
        _VALUE.pack_into(view, 0, value)
        _VALUE.pack_into(view, len(view) - 8, value)
        return message

    def _read_message(self, message: Tensor) -> int:
        view = message.detach().numpy().data.cast("B")
        (value,) = _VALUE.unpack_from(view, 0)
        (last,) = _VALUE.unpack_from(view, len(view) - 8)
        if value != last:
            raise PipelineError(
                f"stage {self._stage}: a message begins with {value:#x} and ends with {last:#x}; "
                "expected the same number at both ends"
            )
        return int(value)
