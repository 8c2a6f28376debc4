"""Averages gradients over the ranks with other data while other stages still run their ops.

A gradient is final after its last write in the last W (or BW) of the stage. Gradients are sent in
buckets, the last used first, as in torch's ``DistributedDataParallel``. A bucket is sent as soon as
its gradients are final, also within the last op if that computes parameter by parameter. Gradients
that another collective changes after the op (FSDP) are sent when that has ended, while other stages
run. The step waits for all buckets at its end.

All ranks of a group send the same buckets in the same order, whatever their plans. The number of
writes to each gradient in the last op is known from the previous iteration. If a gradient changes
after its bucket was sent, the ranks agree to send that bucket again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipemorph.planning.ir import OpKind
from pipemorph.spec.mesh import DATA_DIMENSIONS, Dimension
from pipemorph_trainer.autograd_internals import read_version
from pipemorph_trainer.backward.gradient_form import GradientWriteWatch, grad_dtype, make_zero_grad
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent, DeviceStream
from pipemorph_trainer.topology.placement import has_misplaced_gradient, to_local

if TYPE_CHECKING:
    from pipemorph_trainer.topology.world import World
    from pipemorph_trainer.transport.fault_injection import ReductionFaults

BUCKET_BYTES = 25 << 20
"""Default bucket size of torch."""
WaitForCollective = Callable[[Any], None]
"""Waits for a collective on CPU tensors, with a deadline and a description."""
AveragedDimensions = tuple[Dimension, ...]
"""Dimensions over which a gradient is averaged."""


class ReductionRecord(NamedTuple):
    """Record of a stage's gradient reduction in an iteration.

    ``bytes``: of this rank's gradients. ``seconds``: time in which a bucket was being reduced.
    ``exposed``: seconds from the end of the rank's last op to the end of the reduction, without
    other waits. Both are the minimum over the group, which is the time of its last rank: that one
    waits for the network alone. ``waited``: exposed seconds of this rank.
    """

    iteration: int
    bytes: int
    buckets: int
    seconds: float
    exposed: float
    waited: float


def finish_collective(work: Any, tensor: Tensor, wait: WaitForCollective) -> None:
    """Wait for a collective. On CUDA the stream waits, not the host."""
    if tensor.is_cuda:
        work.wait()
    else:
        wait(work)


class GradientBucket:
    """Bucket of gradients that are sent together; they have the same dtype."""

    def __init__(self, over: AveragedDimensions, dtype: torch.dtype) -> None:
        self.over, self.dtype = over, dtype
        self.parameters: list[Tensor] = []
        self.nbytes = 0
        self.missing = 0
        """Number of parameters whose last write is outstanding."""
        self.flat: Tensor | None = None
        """Sent gradients, later their sum; None before :meth:`send_gradients`."""
        self.work: Any = None
        self._sent: list[tuple[Tensor | None, int]] = []

    def add_parameter(self, parameter: Tensor) -> None:
        self.parameters.append(parameter)
        self.nbytes += to_local(parameter).numel() * self.dtype.itemsize

    def is_misplaced(self) -> bool:
        """True if a gradient is not yet distributed as its parameter."""
        return any(map(has_misplaced_gradient, self.parameters))

    @torch.no_grad()
    def send_gradients(self, group: dist.ProcessGroup) -> None:
        """Begin to sum up copies of the gradients over the group. Missing gradients count as 0."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()
        self._sent = [(p.grad, _count_writes(p.grad)) for p in self.parameters]
        parts = [
            to_local(p.grad).reshape(-1).to(self.dtype)
            if has_gradient(p) and p.grad is not None
            else torch.zeros(to_local(p).numel(), dtype=self.dtype, device=p.device)
            for p in self.parameters
        ]
        self.flat = torch.cat(parts)
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def has_changed(self) -> bool:
        """True if a gradient was written since it was sent."""
        return any(
            p.grad is not grad or _count_writes(grad) != writes
            for p, (grad, writes) in zip(self.parameters, self._sent, strict=True)
        )

    @torch.no_grad()
    def assign_mean(self, size: int, used: set[int]) -> None:
        """Replace the gradients of the parameters with ids in ``used`` by the mean."""
        assert self.flat is not None
        flat, offset = self.flat, 0
        flat /= size
        for parameter in self.parameters:
            count = to_local(parameter).numel()
            if id(parameter) in used:
                if parameter.grad is None:
                    parameter.grad = make_zero_grad(parameter)
                grad = to_local(parameter.grad)
                grad.copy_(flat[offset : offset + count].view_as(grad))
            offset += count
        self.drop_sent()

    def drop_sent(self) -> None:
        """Drop what was sent."""
        self.flat, self.work, self._sent = None, None, []


def has_gradient(parameter: Tensor) -> bool:
    """True if a parameter is trainable and has a gradient. A frozen one may have an old one."""
    return parameter.requires_grad and parameter.grad is not None


def _count_writes(grad: Tensor | None) -> int:
    return 0 if grad is None else read_version(to_local(grad))


def make_buckets(
    parameters: Sequence[tuple[Tensor, AveragedDimensions]], most: int | None = None
) -> list[GradientBucket]:
    """Make buckets of about ``most`` bytes for each group and dtype, the last parameter first.
    Returns them in the order in which they are sent."""
    most = BUCKET_BYTES if most is None else most
    made: list[GradientBucket] = []
    filling: dict[tuple[AveragedDimensions, torch.dtype], GradientBucket] = {}
    for parameter, over in reversed(parameters):
        key = (over, grad_dtype(parameter))
        bucket = filling.get(key)
        if bucket is None or bucket.nbytes >= most:
            bucket = filling[key] = GradientBucket(*key)
            made.append(bucket)
        bucket.add_parameter(parameter)
    return made


class GradientReducer:
    """Averages the gradients of a stage. Call :meth:`begin_iteration`, :meth:`begin_last_op`,
    :meth:`end_last_op`, :meth:`release_gradients` and :meth:`finish_iteration` in every iteration
    with a reduction. Main thread only, except for writes of gradients.

    ``parameters``: with the dimensions over which each is averaged. ``late``: another collective
    changes the gradients after the last op; they are sent in :meth:`release_gradients`. ``marks``:
    flags of this rank that are summed up with the gradients, such as buffers that it wrote.
    ``faults``: of this rank's group.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[Tensor, AveragedDimensions]],
        world: World,
        wait: WaitForCollective,
        *,
        accelerator: Accelerator | None = None,
        late: bool = False,
        marks: Callable[[], list[bool]] = list,
        most: int | None = None,
        faults: ReductionFaults | None = None,
    ) -> None:
        # References the world and not its groups: World.leave() must drop their last references.
        self._world, self._wait, self._marks, self._most = world, wait, marks, most
        self._faults = faults
        self._all = [(p, over) for p, over in parameters if world.get_group(over) is not None]
        self._late = late
        self._overs = sorted({DATA_DIMENSIONS, *(over for _, over in self._all)})
        self._watch = GradientWriteWatch([] if late else [p for p, _ in self._all], self._on_write)
        self._writes_of: dict[OpKind, dict[int, int]] = {}
        """Number of writes to each gradient in the last op of a kind, by the parameter's id."""
        self._counted: dict[int, int] = {}
        self._writes_remaining: dict[int, int] = {}
        self._buckets = make_buckets(self._all, most)
        self._where: dict[int, GradientBucket] = {}
        self._sent = 0
        self._active = self._open = self._ended = self._settled = False
        self._kind = OpKind.W
        self._votes: dict[AveragedDimensions, tuple[Tensor, Any]] = {}
        self._clock = _HostTimer() if accelerator is None else _DeviceTimer(accelerator)
        self._last = (-1.0, 0.0, 0.0)
        """Iteration, seconds and exposed seconds of this rank's newest reduction."""
        self._last_buckets = 0
        self._iteration = -1
        self._extra_seconds = 0.0
        self._reduced: ReductionRecord | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients of this rank."""
        sizes = (to_local(p).numel() * grad_dtype(p).itemsize for p, _ in self._all)
        return sum(sizes)

    def begin_iteration(self, iteration: int, *, stages: int = 1) -> None:
        """Begin an iteration whose gradients are averaged. ``stages``: number of the rank's stages;
        the last to end its ops has the rank's last op."""
        self._active, self._ended, self._iteration = True, False, iteration
        self._stages_remaining = stages
        self._sent, self._votes, self._extra_seconds = 0, {}, 0.0
        self._where = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.drop_sent()
        self._clock.begin_iteration()

    def drop_iteration(self) -> None:
        """End a refused iteration. None of its gradients has changed."""
        self._active = False
        self._watch.close()

    def forget_write_counts(self) -> None:
        """Forget the counts of writes, since the ops have changed."""
        self._writes_of = {}

    def begin_last_op(self, kind: OpKind) -> None:
        """Begin the last op of the iteration, W or BW. Gradients that it is not known to write are
        final."""
        if not self._active or self._late or self._stages_remaining > 1:
            return
        self._kind, self._counted, self._open = kind, {}, False
        known = self._writes_of.get(kind)
        if known is not None:
            self._open = True
            self._writes_remaining = dict(known)
            for key, bucket in self._where.items():
                bucket.missing -= not known.get(key)
            self._send_ready()
        self._watch.open()

    def end_last_op(self) -> None:
        """End the last op: all gradients are final except those that another collective still
        changes."""
        if not self._active:
            return
        self._stages_remaining -= 1
        if self._stages_remaining:
            return
        self._ended = True
        if self._late:
            return
        self._watch.close()
        self._clock.end_ops()
        self._open = False
        self._writes_of[self._kind] = self._counted
        for bucket in self._buckets[self._sent :]:
            bucket.missing = 0
        self._send_ready()
        if self._sent == len(self._buckets):
            self._begin_votes()

    def release_gradients(self) -> None:
        """Send gradients that other collectives changed after the last op, when those have ended.
        Does nothing if the iteration is refused."""
        if self._active and self._ended and self._late:
            self._clock.end_ops()
            self._send_remaining()

    def _send_remaining(self) -> None:
        """Send the remaining buckets, and vote."""
        for bucket in self._buckets[self._sent :]:
            self._send_bucket(bucket)
        self._sent = len(self._buckets)
        if not self._votes:
            self._begin_votes()

    def _on_write(self, parameter: Tensor) -> None:
        """Count a write of a gradient; after its last write, send buckets that are ready."""
        key = id(parameter)
        self._counted[key] = self._counted.get(key, 0) + 1
        if not self._open:
            return
        self._writes_remaining[key] = self._writes_remaining.get(key, 0) - 1
        if self._writes_remaining[key] == 0 and key in self._where:
            self._where[key].missing -= 1
            self._send_ready()

    def _send_ready(self) -> None:
        """Send the buckets whose gradients are final, in order."""
        while self._sent < len(self._buckets):
            bucket = self._buckets[self._sent]
            if bucket.missing > 0 or bucket.is_misplaced():
                break
            self._send_bucket(bucket)
            self._sent += 1
        self._clock.poll_buckets(self._buckets[: self._sent])

    def _send_bucket(self, bucket: GradientBucket) -> None:
        group = self._world.get_group(bucket.over)
        assert group is not None
        self._clock.before_send(bucket)
        bucket.send_gradients(group)
        self._clock.after_send(bucket)

    def _begin_votes(self) -> None:
        """Begin to sum over each group which gradients exist and which buckets must be sent again;
        over all data also the marks, and the times of each rank's last reduction in its place."""
        marks = self._marks()
        for over in self._overs:
            group = self._world.get_group(over)
            if group is None:
                continue
            flags = [has_gradient(p) for p, each in self._all if each == over]
            flags += [bucket.has_changed() for bucket in self._buckets if bucket.over == over]
            values = [float(flag) for flag in flags]
            if over == DATA_DIMENSIONS:
                place, size = dist.get_rank(group), dist.get_world_size(group)
                times = [0.0] * (3 * size)
                times[3 * place : 3 * place + 3] = self._last
                values += [*map(float, marks), *times]
            votes = torch.tensor(values, dtype=torch.float64)
            self._votes[over] = (votes, dist.all_reduce(votes, group=group, async_op=True))

    def finish_iteration(self) -> list[float]:
        """Wait until all gradients are averaged. Returns the sums of the ranks' ``marks``."""
        self._active = False
        self._send_remaining()
        marks, used, again = self._count_votes()
        self._clock.wait_buckets(self._buckets, self._wait)
        self._apply_faults()
        ended = self._clock.read_clock()
        for bucket in self._buckets:
            if bucket in again:
                self._send_now(bucket)
            bucket.assign_mean(dist.get_world_size(self._get_group(bucket.over)), used)
        unsent = [(p, over) for p, over in self._all if id(p) in used and id(p) not in self._where]
        for bucket in make_buckets(unsent, self._most):
            self._send_now(bucket)
            bucket.assign_mean(
                dist.get_world_size(self._get_group(bucket.over)), set(map(id, bucket.parameters))
            )
        if again or unsent:
            self._extra_seconds += self._clock.read_clock() - ended
        self._choose_buckets(used)
        return marks

    def _count_votes(self) -> tuple[list[float], set[int], list[GradientBucket]]:
        """Wait for the votes. Returns the sums of marks, the ids of parameters with a gradient on
        any rank, and the buckets to send again."""
        marks: list[float] = []
        used: set[int] = set()
        again: list[GradientBucket] = []
        for over, (votes, work) in self._votes.items():
            self._wait(work)
            mine = [p for p, each in self._all if each == over]
            buckets = [bucket for bucket in self._buckets if bucket.over == over]
            counts = votes.tolist()
            rest = counts[len(mine) :]
            used.update(id(p) for p, count in zip(mine, counts, strict=False) if count)
            again += [bucket for bucket, dirty in zip(buckets, rest, strict=False) if dirty]
            if over == DATA_DIMENSIONS:
                times = 3 * dist.get_world_size(self._get_group(DATA_DIMENSIONS))
                marks = rest[len(buckets) : len(rest) - times]
                self._record_group_times(rest[len(rest) - times :])
        return marks, used, again

    def _send_now(self, bucket: GradientBucket) -> None:
        bucket.send_gradients(self._get_group(bucket.over))
        assert bucket.flat is not None
        finish_collective(bucket.work, bucket.flat, self._wait)

    def _choose_buckets(self, used: set[int]) -> None:
        """Choose buckets of the gradients that exist; later also of those that appear in
        addition."""
        wanted = set(used)
        if self._settled:
            wanted |= {id(p) for p, _ in self._all if id(p) in self._where and p.requires_grad}
        self._settled = True
        if wanted != {*self._where}:
            self._buckets = make_buckets(
                [(p, over) for p, over in self._all if id(p) in wanted], self._most
            )

    def add_seconds(self, seconds: float) -> None:
        """Add the seconds of another reduction, such as FSDP's; all of them are exposed."""
        self._extra_seconds += seconds

    def _get_group(self, over: AveragedDimensions) -> dist.ProcessGroup:
        group = self._world.get_group(over)
        assert group is not None
        return group

    def _apply_faults(self) -> None:
        """Apply the fault trace if it has faults of this group."""
        if self._faults is None:
            return
        sent = torch.tensor(self._clock.list_send_times() or [0.0], dtype=torch.float64)
        # The network is busy from the moment at which the last rank has sent.
        work = dist.all_reduce(
            sent, op=dist.ReduceOp.MAX, group=self._get_group(DATA_DIMENSIONS), async_op=True
        )
        self._wait(work)
        sizes = [bucket.nbytes for bucket in self._buckets]
        self._clock.delay_ends(
            self._faults.hold_buckets(sent.tolist()[: len(sizes)], sizes, self._iteration)
        )

    def _record_group_times(self, times: Sequence[float]) -> None:
        """Record the group's times of the last reduction if all are of the same iteration."""
        rows = [times[at : at + 3] for at in range(0, len(times), 3)]
        if rows[0][0] >= 0 and all(row[0] == rows[0][0] for row in rows):
            self._reduced = ReductionRecord(
                iteration=int(rows[0][0]),
                bytes=self.nbytes,
                buckets=self._last_buckets,
                seconds=min(row[1] for row in rows),
                exposed=min(row[2] for row in rows),
                waited=self._last[2],
            )

    @property
    def newest_reduction(self) -> ReductionRecord | None:
        """Record that :meth:`take_reduction` will return; equal times on all ranks of a group."""
        return self._reduced

    def take_reduction(self) -> ReductionRecord | None:
        """Return, once, the newest record with times of the whole group: of the previous
        iteration."""
        found, self._reduced = self._reduced, None
        return found

    def measure_reduction(self) -> dict[str, float]:
        """Measure this rank's reduction in the iteration, after :meth:`finish_iteration`: bytes,
        buckets, seconds, and seconds waited after the last op. It waits for a device; call it where
        that is necessary anyway."""
        seconds, exposed = self._clock.measure_seconds()
        extra = self._extra_seconds
        self._last = (float(self._iteration), seconds + extra, exposed + extra)
        self._last_buckets = self._sent
        return {
            "bytes": self.nbytes,
            "buckets": self._last_buckets,
            "seconds": round(self._last[1], 6),
            "waited": round(self._last[2], 6),
        }


class _HostTimer:
    """Times at which buckets were sent and reduced, for collectives of the host. Wall clock,
    seconds. An end is noticed when the next gradient is written or the last op ends.
    """

    def begin_iteration(self) -> None:
        self._ended = 0.0
        self._sent: list[float] = []
        self._done: list[float] = []

    def read_clock(self) -> float:
        return time()

    def end_ops(self) -> None:
        self._ended = time()

    def before_send(self, bucket: GradientBucket) -> None:
        self._sent.append(time())

    def after_send(self, bucket: GradientBucket) -> None:
        """Do nothing: the host notices the end itself."""

    def list_send_times(self) -> list[float]:
        return self._sent

    def poll_buckets(self, sent: Sequence[GradientBucket]) -> None:
        """Note the buckets that have been reduced."""
        for bucket in sent[len(self._done) :]:
            if not bucket.work.is_completed():
                break
            self._done.append(time())

    def wait_buckets(self, buckets: Sequence[GradientBucket], wait: WaitForCollective) -> None:
        for bucket in buckets[len(self._done) :]:
            assert bucket.flat is not None
            finish_collective(bucket.work, bucket.flat, wait)
            self._done.append(time())
        for bucket in buckets:
            # Raises the errors of buckets that were noted before.
            wait(bucket.work)

    def delay_ends(self, until: Sequence[float]) -> None:
        """Apply the ends that a fault trace sets."""
        self._done = [max(pair) for pair in zip(self._done, until, strict=True)]

    def measure_seconds(self) -> tuple[float, float]:
        return _compute_seconds(self._sent, self._done, self._ended)


class _DeviceTimer:
    """Timer for collectives that a device runs, by events. Times count back from the end."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._side: DeviceStream | None = None

    def begin_iteration(self) -> None:
        self._ended: DeviceEvent | None = None
        self._marks: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._begun: DeviceEvent | None = None
        self._host_sent: list[float] = []

    def read_clock(self) -> float:
        return time()

    def end_ops(self) -> None:
        self._ended = self._record_event()

    def before_send(self, bucket: GradientBucket) -> None:
        self._host_sent.append(time())
        self._begun = self._record_event()

    def after_send(self, bucket: GradientBucket) -> None:
        assert self._begun is not None
        if self._side is None:
            self._side = self._accelerator.new_stream()
        with self._accelerator.use_stream(self._side):
            bucket.work.wait()
        self._marks.append((self._begun, self._accelerator.record_event(self._side, timed=True)))

    def list_send_times(self) -> list[float]:
        return self._host_sent

    def poll_buckets(self, sent: Sequence[GradientBucket]) -> None:
        """Do nothing: events give the times later."""

    def wait_buckets(self, buckets: Sequence[GradientBucket], wait: WaitForCollective) -> None:
        for bucket in buckets:
            bucket.work.wait()

    def delay_ends(self, until: Sequence[float]) -> None:
        """Do nothing: the host was delayed, and so is the work that it launches next."""

    def measure_seconds(self) -> tuple[float, float]:
        if not self._marks or self._ended is None:
            return 0.0, 0.0
        self._marks[-1][1].synchronize()
        now = self._record_event()
        now.synchronize()
        seconds = self._accelerator.elapsed_seconds
        sent = [-seconds(mark[0], now) for mark in self._marks]
        done = [-seconds(mark[1], now) for mark in self._marks]
        return _compute_seconds(sent, done, -seconds(self._ended, now))

    def _record_event(self) -> DeviceEvent:
        return self._accelerator.record_event(self._accelerator.compute_stream(), timed=True)


def _compute_seconds(
    sent: Sequence[float], done: Sequence[float], ended: float
) -> tuple[float, float]:
    """Compute the seconds in which a bucket was being reduced, and those after ``ended``."""
    busy, free = 0.0, float("-inf")
    for begun, there in zip(sent, done, strict=True):
        busy += max(0.0, there - max(begun, free))
        free = max(free, there)
    return busy, max(0.0, free - ended) if done else 0.0
