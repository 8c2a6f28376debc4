"""Op times and memory of stages: medians of the profiles of a rank, and states that the job's agent
merges from all columns. Pure, without a clock.

Where the script gives costs of microbatches, the op times of an iteration are first divided by its
mean cost, so that a batch with more work does not count as a slower stage. The medians are those
of times per cost, for the median cost of the newest iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from pipemorph.protocol import ObserverSettings, StageProfile, StageState, StatedOpTimes

MEDIAN_PROFILES = 9
"""Profiles in a median: a few iterations, so that one pause has no effect. A profile has the mean
of each op in an iteration, since an iteration takes their sum."""
RECENT_PROFILES = 3
"""Newest profiles that show if a stage is slow now: one pause among them has no effect."""
FASTER_FACTOR, FASTER_PROFILES = 1.1, 2
"""Ratio of earlier op times to the newest QUICK ones from which the earlier ones are outdated."""
INFLATED_FACTOR = 1.3
"""Ratio to the shortest recent time from which ops are inflated."""
WORK_ERRORS = 4.0
"""Standard errors of mean op times, by differences in work of the microbatches, that may explain a
difference between two of them."""
FUSING_GAIN = 0.02
"""Least saving of a fused backward, as a fraction of its parts, for the planner to use it. Less is
within the error of measured op times."""


def _compute_usual(times: Sequence[float]) -> float:
    """Median of times, or of the newest if all of these are shorter, which no pause explains."""
    middle, newest = median(times), [*times][-FASTER_PROFILES:]
    return median(newest) if FASTER_FACTOR * max(newest) < middle else middle


class StageProfiles:
    """Newest profiles of one stage of a rank. ``expected``: op times that the spec states."""

    def __init__(self, stage: int, replica: int) -> None:
        self._stage, self._replica = stage, replica
        self._ops: deque[tuple[float, float, float]] = deque(maxlen=MEDIAN_PROFILES)
        self._fused: deque[float] = deque(maxlen=MEDIAN_PROFILES)
        """Times of fused backwards, which are as noisy as their parts."""
        self._costs: deque[float] = deque(maxlen=MEDIAN_PROFILES)
        """Mean costs of the same iterations; empty without costs, and then times are per cost 1."""
        self._work_errors: deque[float] = deque(maxlen=MEDIAN_PROFILES)
        self._newest: StageProfile | None = None
        self._activation_bytes: int | None = None
        self._input_bytes: int | None = None
        self._offload_copy: float | None = None
        self.ops_inflated = False
        """True if the newest ops took longer than they can: something else used the processor."""
        self.expected: StatedOpTimes | None = None
        self.offloads = False
        """True if activations may go to host memory, so that ops may be longer by a copy."""

    def add_profile(self, profile: StageProfile) -> None:
        """Add a profile. If its backwards were fused, the last times of B and W stay."""
        if (profile.cost is None) is bool(self._costs):
            # Times with and without costs have no common unit.
            self._ops.clear()
            self._fused.clear()
            self._costs.clear()
            self._work_errors.clear()
        self._work_errors.append(profile.work_error)
        cost = 1.0 if profile.cost is None else profile.cost
        if profile.cost is not None:
            self._costs.append(cost)
        backward, weight = profile.backward_input / cost, profile.backward_weight / cost
        if profile.fused_backward is not None:
            self._fused.append(profile.fused_backward / cost)
        if profile.split != "fused" and not weight:
            if profile.fused_backward is None:
                self._fused.append(backward)
            if self._ops:
                _, backward, weight = self._ops[-1]
            elif self.expected is not None:
                backward = self.expected.backward_input / cost
                weight = self.expected.backward_weight / cost
        self._ops.append((profile.forward / cost, backward, weight))
        times = [sum(ops) for ops in self._ops]
        inflated = max(INFLATED_FACTOR, 1 + WORK_ERRORS * median(self._work_errors))
        self.ops_inflated = times[-1] > inflated * min(times)
        self._newest = profile
        if profile.activation_bytes:
            self._activation_bytes = max(self._activation_bytes or 0, profile.activation_bytes)
        if profile.input_bytes is not None:
            self._input_bytes = max(self._input_bytes or 0, profile.input_bytes)
        if profile.offload_copy is not None:
            self._offload_copy = profile.offload_copy

    def get_longest_op(self) -> float:
        """Longest op, including a copy, in seconds; infinite if unknown. A backward and its weight
        part count as one."""
        if self._ops:
            forward, backward, weight = (self._usual_cost * took for took in self._ops[-1])
        elif self.expected is not None:
            forward, backward, weight = (
                self.expected.forward,
                self.expected.backward_input,
                self.expected.backward_weight,
            )
        else:
            return float("inf")
        copies = self.offloads and self._activation_bytes
        return max(forward, backward + weight) + ((self._offload_copy or 0.0) if copies else 0.0)

    @property
    def _usual_cost(self) -> float:
        """Cost that the reported op times are for."""
        return median(self._costs) if self._costs else 1.0

    def build_state(self) -> StageState | None:
        """Medians of the profiles; None without any. A fused backward is as measured."""
        if self._newest is None:
            return None
        cost = self._usual_cost
        forward, backward, weight = (
            cost * _compute_usual(times) for times in zip(*self._ops, strict=True)
        )
        return StageState(
            stage=self._stage,
            forward=forward,
            backward_input=backward,
            backward_weight=weight,
            fused_backward=cost * _compute_usual(self._fused) if self._fused else None,
            activation_bytes=self._activation_bytes,
            input_bytes=self._input_bytes,
            offload_copy=self._offload_copy,
            peak_memory=self._newest.peak_memory,
            crowding=self._newest.crowding or 0.0,
            replica=self._replica,
            profiles=len(self._ops),
            recent=cost * median(map(sum, list(self._ops)[-RECENT_PROFILES:])),
            clock=self._newest.clock,
            cost=cost if self._costs else None,
            work_error=median(self._work_errors),
        )


class StageMonitor:
    """Merges states of a job's stages, from its ranks."""

    def __init__(self, stages: int) -> None:
        self._stages: list[dict[int, StageState]] = [{} for _ in range(stages)]
        """States by stage and column."""
        self._changed: set[int] = set()

    def update_state(self, state: StageState) -> None:
        """Process the state of one column of a stage."""
        self._stages[state.stage][state.replica] = state
        self._changed.add(state.stage)

    def take_changed_stages(self) -> list[int]:
        """Stages with states since the last call."""
        found, self._changed = sorted(self._changed), set()
        return found

    def merge_columns(self, stage: int) -> StageState:
        """Merge the columns of a stage: the slowest of each op, since all columns wait for it."""
        states = list(self._stages[stage].values())
        fused = [state.fused_backward for state in states]
        whole = None if None in fused else max(each or 0.0 for each in fused)
        backward_input = max(state.backward_input for state in states)
        backward_weight = max(state.backward_weight for state in states)
        if whole is not None and whole > (1 - FUSING_GAIN) * (backward_input + backward_weight):
            whole = None
        copies = [state.offload_copy for state in states if state.offload_copy is not None]
        return StageState.model_construct(
            stage=stage,
            forward=max(state.forward for state in states),
            backward_input=backward_input,
            backward_weight=backward_weight,
            fused_backward=whole,
            activation_bytes=_max_known(state.activation_bytes for state in states),
            input_bytes=_max_known(state.input_bytes for state in states),
            offload_copy=max(copies, default=None),
            peak_memory=max(state.peak_memory for state in states),
            crowding=max(state.crowding for state in states),
        )


def get_expected_ops(settings: ObserverSettings, stage: int) -> StatedOpTimes | None:
    """Op times of a stage as the spec states them; None if it does not."""
    return settings.ops[stage] if stage < len(settings.ops) else None


def _max_known(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
