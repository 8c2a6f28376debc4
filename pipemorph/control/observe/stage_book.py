"""Op times and memory of the stages, from the profiles of their ranks. Pure, without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from pipemorph.wire import ObserverSettings, StageOps, StageProfile, StageState

WINDOWS = 9
"""Profiles in a median: a few iterations, so that one pause has no effect. A profile has the mean
of each op in an iteration, since an iteration takes their sum."""

INFLATED = 1.3
"""Ops that take so many times their shortest time of late are inflated."""
FUSING_PAYS = 0.02
"""Least saving of a fused backward, as a fraction of its parts, for the planner to use it. Less is
within the error of measured op times."""


class _Windows:
    """Newest profiles of one stage in one column. Only op times, since a job has many.

    ``fused``: times of fused backwards, which are as noisy as their parts.
    """

    __slots__ = ("crowding", "fused", "medians", "ops", "peak_memory", "whole")

    def __init__(self) -> None:
        self.ops: deque[tuple[float, float, float]] = deque(maxlen=WINDOWS)
        self.fused: deque[float] = deque(maxlen=WINDOWS)
        self.peak_memory = 0
        self.crowding = 0.0
        self.medians = (0.0, 0.0, 0.0)
        """Of F, B and W."""
        self.whole: float | None = None
        """The median of fused backwards; None if there was none."""

    def add(self, profile: StageProfile, expected: StageOps | None) -> None:
        """Add a profile. If its backwards were fused, the last times of B and W are kept."""
        backward, weight = profile.backward_input, profile.backward_weight
        if profile.fused_backward is not None:
            self.fused.append(profile.fused_backward)
        if profile.split != "fused" and not weight:
            if profile.fused_backward is None:
                self.fused.append(backward)
            if self.ops:
                _, backward, weight = self.ops[-1]
            elif expected is not None:
                backward, weight = expected.backward_input, expected.backward_weight
        self.ops.append((profile.forward, backward, weight))
        self.peak_memory = profile.peak_memory
        self.crowding = profile.crowding or 0.0
        forwards, backwards, weights = zip(*self.ops, strict=True)
        self.medians = median(forwards), median(backwards), median(weights)
        self.whole = median(self.fused) if self.fused else None

    @property
    def inflated(self) -> bool:
        """Whether the newest ops took longer than they can: something else used the processor."""
        times = [sum(ops) for ops in self.ops]
        return times[-1] > INFLATED * min(times)

    @property
    def longest(self) -> float:
        """The longest of the newest ops; a backward and its weight part count as one."""
        forward, backward, weight = self.ops[-1]
        return max(forward, backward + weight)


class _Stage:
    """One stage in all columns."""

    def __init__(self) -> None:
        self.columns: dict[int, _Windows] = {}
        self.longest: float | None = None
        """Of the newest ops of all columns; None if it has to be computed again."""
        self.activation_bytes: int | None = None
        self.input_bytes: int | None = None
        self.offload_copy: float | None = None

    def add(self, profile: StageProfile, expected: StageOps | None) -> None:
        windows = self.columns.get(profile.replica)
        before = 0.0
        if windows is None:
            windows = self.columns[profile.replica] = _Windows()
        else:
            before = windows.longest
        windows.add(profile, expected)
        if self.longest is None or windows.longest >= self.longest:
            self.longest = windows.longest if self.longest is not None else None
        elif before == self.longest:
            self.longest = None
        if profile.activation_bytes:
            self.activation_bytes = max(self.activation_bytes or 0, profile.activation_bytes)
        if profile.input_bytes is not None:
            self.input_bytes = max(self.input_bytes or 0, profile.input_bytes)
        if profile.offload_copy is not None:
            self.offload_copy = profile.offload_copy

    def longest_op(self) -> float:
        if self.longest is None:
            self.longest = max(each.longest for each in self.columns.values())
        return self.longest


class StageBook:
    """Medians of measured op times per stage, of the slowest column, since all wait for it."""

    def __init__(self, stages: int, settings: ObserverSettings | None = None) -> None:
        self._stages = [_Stage() for _ in range(stages)]
        self._changed: set[int] = set()
        self.set(settings or ObserverSettings())

    def set(self, settings: ObserverSettings) -> None:
        """Use the op times of these settings where there are no measurements yet."""
        stated = len(settings.ops) == len(self._stages)
        self._expected: list[StageOps] | None = settings.ops if stated else None
        self._offloads = settings.offloads

    def observe(self, profile: StageProfile) -> None:
        expected = self._expected[profile.stage] if self._expected else None
        self._stages[profile.stage].add(profile, expected)
        self._changed.add(profile.stage)

    def changed(self) -> list[int]:
        """Stages with profiles since the last call."""
        found, self._changed = sorted(self._changed), set()
        return found

    def part(self, stage: int) -> StageState | None:
        """The state of a stage in the columns with profiles here, for the job's agent. Its fused
        backward is as measured. None without profiles. Walks its columns."""
        known = self._stages[stage]
        columns = list(known.columns.values())
        if not columns:
            return None
        forward, backward_input, backward_weight = (
            max(times) for times in zip(*(each.medians for each in columns), strict=True)
        )
        fused = [each.whole for each in columns if each.whole is not None]
        whole = max(fused) if len(fused) == len(columns) else None
        return StageState.model_construct(
            stage=stage,
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            fused_backward=whole,
            activation_bytes=known.activation_bytes,
            input_bytes=known.input_bytes,
            offload_copy=known.offload_copy,
            peak_memory=max(each.peak_memory for each in columns),
            crowding=max(each.crowding for each in columns),
        )

    def state(self, stage: int, elsewhere: Iterable[StageState] = ()) -> StageState:
        """The state of a stage with profiles. ``elsewhere``: that of its columns in other parts."""
        mine = self.part(stage)
        merged = _merged([*([mine] if mine is not None else []), *elsewhere])
        whole, parts = merged.fused_backward, merged.backward_input + merged.backward_weight
        if whole is not None and whole > (1 - FUSING_PAYS) * parts:
            return merged.model_copy(update={"fused_backward": None})
        return merged

    def inflated(self, stage: int, replica: int) -> bool:
        """Whether the newest ops of a rank show that something else used its processor."""
        windows = self._stages[stage].columns.get(replica)
        return windows is not None and windows.inflated

    def longest_op(self, stage: int) -> float:
        """Longest op of a stage, including a copy, in seconds; infinite if unknown."""
        known = self._stages[stage]
        copies = self._offloads and known.activation_bytes
        copy = (known.offload_copy or 0.0) if copies else 0.0
        if known.columns:
            return known.longest_op() + copy
        if self._expected is not None:
            ops = self._expected[stage]
            return max(ops.forward, ops.backward_input + ops.backward_weight) + copy
        return float("inf")


def _merged(states: list[StageState]) -> StageState:
    """The slowest of each, since all columns wait for it."""
    first, *others = states
    if not others:
        return first
    fused = [state.fused_backward for state in states]
    copies = [state.offload_copy for state in states if state.offload_copy is not None]
    return StageState.model_construct(
        stage=first.stage,
        forward=max(state.forward for state in states),
        backward_input=max(state.backward_input for state in states),
        backward_weight=max(state.backward_weight for state in states),
        fused_backward=None if None in fused else max(whole or 0.0 for whole in fused),
        activation_bytes=_most(state.activation_bytes for state in states),
        input_bytes=_most(state.input_bytes for state in states),
        offload_copy=max(copies, default=None),
        peak_memory=max(state.peak_memory for state in states),
        crowding=max(state.crowding for state in states),
    )


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
