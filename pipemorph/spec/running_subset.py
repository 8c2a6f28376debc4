"""The running subset of a job: active replicas, and the pods that host them.

Running replicas are numbered from 0, in order, and so are their ranks. So the subset looks like a
job with fewer replicas to all its users.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.sections.faults import Fault
from pipemorph.spec.sections.parallelism import Parallelism


@dataclass(frozen=True)
class RunningSubset:
    """Part of a job that runs: ``parallelism`` without the replicas ``excluded_replicas``."""

    parallelism: Parallelism
    excluded_replicas: tuple[int, ...] = ()

    def with_ready_pods(self, ready: Collection[int]) -> RunningSubset:
        """Subset of the replicas whose pods are ``ready``, in a job with ``minReplicas``."""
        # Start from the missing pods: even a large job lacks only a few.
        lacking = frozenset(range(self.parallelism.pods)).difference(ready)
        missing = {replica for pod in lacking for replica in self.find_replicas_in_pod(pod)}
        return replace(self, excluded_replicas=tuple(sorted(missing)))

    @cached_property
    def active_replicas(self) -> tuple[int, ...]:
        """Running replicas, by their numbers in the whole job."""
        missing = frozenset(self.excluded_replicas)
        return tuple(each for each in range(self.parallelism.replicas) if each not in missing)

    @cached_property
    def _number_by_replica(self) -> dict[int, int]:
        return {replica: number for number, replica in enumerate(self.active_replicas)}

    @cached_property
    def active_pods(self) -> tuple[int, ...]:
        """Pods with running ranks, by their numbers in the Job."""
        return tuple(filter(self.runs_in_pod, range(self.parallelism.pods)))

    def runs_in_pod(self, pod: int) -> bool:
        """True if any rank of a pod runs."""
        return not self.excluded_replicas or any(
            each in self._number_by_replica for each in self.find_replicas_in_pod(pod)
        )

    def find_replicas_in_pod(self, pod: int) -> range:
        """Replicas with ranks in a pod, in a job with ``minReplicas``: one, or whole ones."""
        stride, each = self.parallelism.mesh.replica_stride, self.parallelism.ranks_per_pod
        first, last = pod * each, (pod + 1) * each - 1
        if stride % each == 0:
            replica = first // stride % self.parallelism.replicas
            return range(replica, replica + 1)
        return range(first // stride, last // stride + 1)

    def renumber_rank(self, rank: int) -> int:
        """Number among the running ranks of a rank of the whole job."""
        stride = self.parallelism.mesh.replica_stride
        outer, inner = divmod(rank, stride)
        outer, replica = divmod(outer, self.parallelism.replicas)
        return (
            outer * len(self.active_replicas) + self._number_by_replica[replica]
        ) * stride + inner

    def build_reduced_spec(self, whole: JobSpec) -> JobSpec:
        """Spec of the smaller job. Each replica gets the same part of a batch as in the whole job;
        with ``batch: keep`` it gets more microbatches of the same size, for the same batch."""
        if not self.excluded_replicas:
            return whole
        count = len(self.active_replicas)
        schedule, batch = whole.schedule, whole.schedule.global_batch_size
        if self.parallelism.batch == "keep":
            microbatches = schedule.microbatches * self.parallelism.replicas // count
            schedule = schedule.model_copy(update={"microbatches": microbatches})
        elif batch is not None:
            schedule = schedule.model_copy(
                update={"global_batch_size": batch * count // self.parallelism.replicas}
            )
        found = (self._renumber_fault(each) for each in whole.faults)
        return whole.model_copy(
            update={
                "parallelism": self.parallelism.model_copy(update={"replicas": count}),
                "schedule": schedule,
                "faults": [each for each in found if each is not None],
            }
        )

    def _renumber_fault(self, fault: Fault) -> Fault | None:
        """Fault with the numbers of the subset; None if it concerns only excluded replicas."""
        if fault.between is not None:
            numbers = {pod: number for number, pod in enumerate(self.active_pods)}
            if not numbers.keys() >= set(fault.between):
                return None
            return fault.model_copy(update={"between": [numbers[each] for each in fault.between]})
        if fault.reduction is not None:
            others = self.parallelism.mesh.data_size // self.parallelism.replicas
            if len(self.active_replicas) * others == 1:
                return None
        # In faults, as in telemetry, ``replica`` is the number of a column.
        each = self.parallelism.mesh.lockstep_size
        replica, inner = divmod(fault.replica, each)
        if replica not in self._number_by_replica:
            return None
        return fault.model_copy(update={"replica": self._number_by_replica[replica] * each + inner})
