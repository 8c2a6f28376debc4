"""The running subset of a job: active replicas, and the pods that host them.

Replicas that run are numbered from 0, in order, and so are their ranks: what runs is a job with
fewer replicas, and whoever looks at it needs to know no more than that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from pipemorph.api.sections.faults import Fault
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.spec import JobSpec


@dataclass(frozen=True)
class Running:
    """Part of a job that runs: the mesh ``cut`` without the replicas ``left_out``."""

    cut: Parallelism
    left_out: tuple[int, ...] = ()

    def in_pods(self, ready: Collection[int]) -> Running:
        """All replicas whose pods are ``ready``. For a job with ``minReplicas``."""
        # A large job lacks few pods.
        lacking = frozenset(range(self.cut.pods)).difference(ready)
        missing = {replica for pod in lacking for replica in self.of_pod(pod)}
        return replace(self, left_out=tuple(sorted(missing)))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Those that run, by their numbers in the whole job."""
        missing = frozenset(self.left_out)
        return tuple(each for each in range(self.cut.replicas) if each not in missing)

    @cached_property
    def _number(self) -> dict[int, int]:
        return {replica: number for number, replica in enumerate(self.replicas)}

    @cached_property
    def pods(self) -> tuple[int, ...]:
        """Pods with ranks that run, by their numbers in the Job."""
        return tuple(filter(self.has, range(self.cut.pods)))

    def has(self, pod: int) -> bool:
        """Whether ranks of a pod run. With several whole replicas in it, whether any does."""
        return not self.left_out or any(each in self._number for each in self.of_pod(pod))

    def of_pod(self, pod: int) -> range:
        """The replicas of which a pod has ranks, in a job with ``minReplicas``: one, or all of its
        ranks are whole replicas."""
        stride, each = self.cut.mesh.replica_stride, self.cut.ranks_per_pod
        first, last = pod * each, (pod + 1) * each - 1
        if stride % each == 0:
            replica = first // stride % self.cut.replicas
            return range(replica, replica + 1)
        return range(first // stride, last // stride + 1)

    def rank(self, rank: int) -> int:
        """The number that a rank of the whole job has among those that run."""
        stride = self.cut.mesh.replica_stride
        outer, inner = divmod(rank, stride)
        outer, replica = divmod(outer, self.cut.replicas)
        return (outer * len(self.replicas) + self._number[replica]) * stride + inner

    def spec(self, whole: JobSpec) -> JobSpec:
        """The smaller job. Each replica has the part of a batch that it has in the whole one; with
        ``batch: keep`` it has more microbatches of the same size, which make the same batch."""
        if not self.left_out:
            return whole
        count = len(self.replicas)
        schedule, batch = whole.schedule, whole.schedule.global_batch_size
        if self.cut.batch == "keep":
            microbatches = schedule.microbatches * self.cut.replicas // count
            schedule = schedule.model_copy(update={"microbatches": microbatches})
        elif batch is not None:
            schedule = schedule.model_copy(
                update={"global_batch_size": batch * count // self.cut.replicas}
            )
        found = (self._fault(each) for each in whole.faults)
        return whole.model_copy(
            update={
                "parallelism": self.cut.model_copy(update={"replicas": count}),
                "schedule": schedule,
                "faults": [each for each in found if each is not None],
            }
        )

    def _fault(self, fault: Fault) -> Fault | None:
        """A fault of what runs; None if it is of what does not."""
        if fault.between is not None:
            numbers = {pod: number for number, pod in enumerate(self.pods)}
            if not numbers.keys() >= set(fault.between):
                return None
            return fault.model_copy(update={"between": [numbers[each] for each in fault.between]})
        if fault.reduction is not None:
            others = self.cut.mesh.data // self.cut.replicas
            if len(self.replicas) * others == 1:
                return None
        # In faults, as in telemetry, it is the number of a column.
        each = self.cut.mesh.lockstep
        replica, inner = divmod(fault.replica, each)
        if replica not in self._number:
            return None
        return fault.model_copy(update={"replica": self._number[replica] * each + inner})
