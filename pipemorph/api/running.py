"""The running subset of a job: active replicas, and the pods that host them.

Replicas that run are numbered from 0, in order, and so are their ranks: what runs is a job with
fewer replicas, and whoever looks at it needs to know no more than that.

A *place* is what the ranks of one pod make up: place ``p`` has the ranks from ``p × ranksPerPod``
on. There are as many as pods, and each begins in the pod of its number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from pipemorph.api.sections.faults import Fault
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.spec import JobSpec

Places = tuple[tuple[int, int], ...]
"""Of each place that is not in the pod of its number, that place and its pod."""


@dataclass(frozen=True)
class Running:
    """What runs of a job that is cut as ``cut``, without the replicas ``left_out``, with its
    ``places`` in these pods."""

    cut: Parallelism
    left_out: tuple[int, ...] = ()
    places: Places = ()

    def fits(self) -> bool:
        """Whether every place is in one pod of the job, and no pod has two. Who has
        :attr:`places` from elsewhere has to ask."""
        known, cut = self._pod_of, self.cut
        inside = all(0 <= place < cut.pods and 0 <= pod < cut.pods for place, pod in self.places)
        # Places that are not named are in the pods of their numbers.
        touched = {*known, *known.values()}
        pods = {self.pod(place) for place in touched}
        return inside and len(known) == len(self.places) and len(pods) == len(touched)

    @cached_property
    def _pod_of(self) -> dict[int, int]:
        return dict(self.places)

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {pod: place for place, pod in self.places}

    def pod(self, place: int) -> int:
        """The pod that a place is in."""
        return self._pod_of.get(place, place)

    def place(self, pod: int) -> int:
        """The place that is in a pod."""
        return self._place_of.get(pod, pod)

    def in_pods(self, ready: Collection[int]) -> Running:
        """All replicas whose pods are ``ready``, in the places that they have here. For a job with
        ``minReplicas``."""
        # A large job lacks few pods.
        lacking = frozenset(range(self.cut.pods)).difference(ready)
        missing = {replica for pod in lacking for replica in self.of_place(self.place(pod))}
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
    def running_places(self) -> tuple[int, ...]:
        """Those with ranks that run, by their numbers in the whole job."""
        return tuple(place for place in range(self.cut.pods) if self._runs(place))

    @cached_property
    def pods(self) -> tuple[int, ...]:
        """Those with ranks that run, by their numbers in the Job, in the order of their ranks."""
        return tuple(self.pod(place) for place in self.running_places)

    def has(self, pod: int) -> bool:
        """Whether ranks of a pod run. With several whole replicas in it, whether any does."""
        return self._runs(self.place(pod))

    def _runs(self, place: int) -> bool:
        return not self.left_out or any(each in self._number for each in self.of_place(place))

    def of_place(self, place: int) -> range:
        """The replicas of which a place has ranks, in a job with ``minReplicas``: one, or all of
        its ranks are whole replicas."""
        stride, each = self.cut.mesh.replica_stride, self.cut.ranks_per_pod
        first, last = place * each, (place + 1) * each - 1
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
            numbers = {place: number for number, place in enumerate(self.running_places)}
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
