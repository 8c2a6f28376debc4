"""Averages gradients over the ranks with other data while other stages still run their ops.

A gradient is final after the last write to it in the last W (or BW) of the stage. Gradients are
sent in buckets, the last used first, as torch's ``DistributedDataParallel`` sends them: a bucket
leaves as soon as its last gradient is final, within that op where it is computed parameter by
parameter. Gradients that another collective still changes, as FSDP does, leave when that has ended,
while other stages run. The step waits for them at its end.

All ranks of a group send the same buckets in the same order, whatever their plans. How often the
last op writes each gradient is learned from the iteration before. If a gradient changes after its
bucket has left, the ranks agree to send that bucket again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipemorph.api.mesh import DATA, Dimension
from pipemorph.planning.ir import OpKind
from pipemorph_trainer.executor.grad_form import Watch, grad_dtype, zero_grad
from pipemorph_trainer.executor.torch_private import version
from pipemorph_trainer.topology.accelerator import Accelerator, Event, Stream
from pipemorph_trainer.topology.placement import local, misplaced

if TYPE_CHECKING:
    from pipemorph_trainer.links.faults import ReductionFaults
    from pipemorph_trainer.topology.world import World

BUCKET_BYTES = 25 << 20
"""torch's own size of a bucket."""
Wait = Callable[[Any], None]
"""Waits for a collective on CPU tensors, with a deadline and a description."""
Over = tuple[Dimension, ...]
"""Dimensions over which a gradient is averaged."""


class Reduced(NamedTuple):
    """How the gradients of a stage were reduced in one iteration.

    ``bytes``: of this rank's gradients. ``seconds``: during which a bucket was under way.
    ``exposed``: from the end of the rank's last op to the end of the reduction, without waits for
    other things. Times are the least of the ranks of the group: that of the rank which was the last
    to come, and so waited for the network alone. ``waited``: of this rank.
    """

    iteration: int
    bytes: int
    buckets: int
    seconds: float
    exposed: float
    waited: float


def finish(work: Any, tensor: Tensor, wait: Wait) -> None:
    """Wait for a collective. On CUDA the stream waits, not the host."""
    if tensor.is_cuda:
        work.wait()
    else:
        wait(work)


class Bucket:
    """Gradients of one dtype that are sent together."""

    def __init__(self, over: Over, dtype: torch.dtype) -> None:
        self.over, self.dtype = over, dtype
        self.parameters: list[Tensor] = []
        self.nbytes = 0
        self.missing = 0
        """Parameters whose last write has not been seen."""
        self.flat: Tensor | None = None
        """What was sent, and then the sum; None before."""
        self.work: Any = None
        self._sent: list[tuple[Tensor | None, int]] = []

    def add(self, parameter: Tensor) -> None:
        self.parameters.append(parameter)
        self.nbytes += local(parameter).numel() * self.dtype.itemsize

    def misplaced(self) -> bool:
        """Whether a gradient is not yet distributed as its parameter."""
        return any(map(misplaced, self.parameters))

    @torch.no_grad()
    def send(self, group: dist.ProcessGroup) -> None:
        """Begin to add up a copy of the gradients. One that is missing counts as zero."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()
        self._sent = [(p.grad, _writes(p.grad)) for p in self.parameters]
        parts = [
            local(p.grad).reshape(-1).to(self.dtype)
            if has_gradient(p) and p.grad is not None
            else torch.zeros(local(p).numel(), dtype=self.dtype, device=p.device)
            for p in self.parameters
        ]
        self.flat = torch.cat(parts)
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def changed(self) -> bool:
        """Whether a gradient was written since it was sent."""
        return any(
            p.grad is not grad or _writes(grad) != writes
            for p, (grad, writes) in zip(self.parameters, self._sent, strict=True)
        )

    @torch.no_grad()
    def spread(self, size: int, used: set[int]) -> None:
        """Replace the gradients of the parameters with ids in ``used`` by the mean."""
        assert self.flat is not None
        flat, offset = self.flat, 0
        flat /= size
        for parameter in self.parameters:
            count = local(parameter).numel()
            if id(parameter) in used:
                if parameter.grad is None:
                    parameter.grad = zero_grad(parameter)
                grad = local(parameter.grad)
                grad.copy_(flat[offset : offset + count].view_as(grad))
            offset += count
        self.clear()

    def clear(self) -> None:
        """Drop what was sent."""
        self.flat, self.work, self._sent = None, None, []


def has_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient that counts: not a frozen one, which may have an old
    gradient."""
    return parameter.requires_grad and parameter.grad is not None


def _writes(grad: Tensor | None) -> int:
    return 0 if grad is None else version(local(grad))


def make_buckets(
    parameters: Sequence[tuple[Tensor, Over]], most: int | None = None
) -> list[Bucket]:
    """Buckets of about ``most`` bytes, the last parameter first; those of each group and dtype
    apart. In the order in which they are sent."""
    most = BUCKET_BYTES if most is None else most
    made: list[Bucket] = []
    filling: dict[tuple[Over, torch.dtype], Bucket] = {}
    for parameter, over in reversed(parameters):
        key = (over, grad_dtype(parameter))
        bucket = filling.get(key)
        if bucket is None or bucket.nbytes >= most:
            bucket = filling[key] = Bucket(*key)
            made.append(bucket)
        bucket.add(parameter)
    return made


class Reducer:
    """Averages the gradients of one stage: :meth:`begin`, :meth:`begin_last_op`,
    :meth:`end_last_op`, :meth:`release` and :meth:`finish` in every iteration that does. Main
    thread only, but for writes of gradients.

    ``parameters``: with the dimensions over which each is averaged. ``late``: another collective
    changes them after the last op; they are sent in :meth:`release`. ``marks``: what every rank
    says with them, such as which buffers it wrote. ``faults``: of this rank's group.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[Tensor, Over]],
        world: World,
        wait: Wait,
        *,
        accelerator: Accelerator | None = None,
        late: bool = False,
        marks: Callable[[], list[bool]] = list,
        most: int | None = None,
        faults: ReductionFaults | None = None,
    ) -> None:
        # Keeps the world and not its groups, whose last references World.leave() drops.
        self._world, self._wait, self._marks, self._most = world, wait, marks, most
        self._faults = faults
        self._all = [(p, over) for p, over in parameters if world.group(over) is not None]
        self._late = late
        self._overs = sorted({DATA, *(over for _, over in self._all)})
        self._watch = Watch([] if late else [p for p, _ in self._all], self._on_write)
        self._writes_of: dict[OpKind, dict[int, int]] = {}
        """How often the last op of a kind writes each gradient, by the parameter's id."""
        self._counted: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._buckets = make_buckets(self._all, most)
        self._where: dict[int, Bucket] = {}
        self._sent = 0
        self._active = self._open = self._ended = self._settled = False
        self._kind = OpKind.W
        self._votes: dict[Over, tuple[Tensor, Any]] = {}
        self._clock = _HostClock() if accelerator is None else _DeviceClock(accelerator)
        self._last = (-1.0, 0.0, 0.0)
        """Iteration, seconds and exposed seconds of this rank's newest reduction."""
        self._last_buckets = 0
        self._iteration = -1
        self._extra_seconds = 0.0
        self._reduced: Reduced | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients of this rank."""
        sizes = (local(p).numel() * grad_dtype(p).itemsize for p, _ in self._all)
        return sum(sizes)

    def begin(self, iteration: int, *, stages: int = 1) -> None:
        """Begin an iteration whose gradients are averaged. ``stages``: each has a last op, and the
        last of these is that of the rank."""
        self._active, self._ended, self._iteration = True, False, iteration
        self._stages_left = stages
        self._sent, self._votes, self._extra_seconds = 0, {}, 0.0
        self._where = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.clear()
        self._clock.begin()

    def drop(self) -> None:
        """End a refused iteration. None of its gradients has changed."""
        self._active = False
        self._watch.close()

    def forget(self) -> None:
        """Learn again when gradients are final: the ops have changed."""
        self._writes_of = {}

    def begin_last_op(self, kind: OpKind) -> None:
        """The last op of the iteration, W or BW, begins. Gradients that it does not write, as far
        as known, are final."""
        if not self._active or self._late or self._stages_left > 1:
            return
        self._kind, self._counted, self._open = kind, {}, False
        known = self._writes_of.get(kind)
        if known is not None:
            self._open = True
            self._left = dict(known)
            for key, bucket in self._where.items():
                bucket.missing -= not known.get(key)
            self._send_ready()
        self._watch.open()

    def end_last_op(self) -> None:
        """The last op has ended: all gradients are final but those that another collective still
        changes."""
        if not self._active:
            return
        self._stages_left -= 1
        if self._stages_left:
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
            self._vote()

    def release(self) -> None:
        """The collectives have ended that change gradients after the last op. Does nothing if the
        iteration is refused."""
        if self._active and self._ended and self._late:
            self._clock.end_ops()
            self._send_rest()

    def _send_rest(self) -> None:
        """Send the buckets that are left, and vote."""
        for bucket in self._buckets[self._sent :]:
            self._send(bucket)
        self._sent = len(self._buckets)
        if not self._votes:
            self._vote()

    def _on_write(self, parameter: Tensor) -> None:
        key = id(parameter)
        self._counted[key] = self._counted.get(key, 0) + 1
        if not self._open:
            return
        self._left[key] = self._left.get(key, 0) - 1
        if self._left[key] == 0 and key in self._where:
            self._where[key].missing -= 1
            self._send_ready()

    def _send_ready(self) -> None:
        """Send the buckets whose gradients are final, in order."""
        while self._sent < len(self._buckets):
            bucket = self._buckets[self._sent]
            if bucket.missing > 0 or bucket.misplaced():
                break
            self._send(bucket)
            self._sent += 1
        self._clock.poll(self._buckets[: self._sent])

    def _send(self, bucket: Bucket) -> None:
        group = self._world.group(bucket.over)
        assert group is not None
        self._clock.sends(bucket)
        bucket.send(group)
        self._clock.sent(bucket)

    def _vote(self) -> None:
        """Tell each group which gradients there are, which buckets have to be sent again, and
        what else is to be told: of the group over all data also the times of the last reduction,
        each rank in its own place."""
        marks = self._marks()
        for over in self._overs:
            group = self._world.group(over)
            if group is None:
                continue
            said = [has_gradient(p) for p, each in self._all if each == over]
            said += [bucket.changed() for bucket in self._buckets if bucket.over == over]
            told = [float(value) for value in said]
            if over == DATA:
                place, size = dist.get_rank(group), dist.get_world_size(group)
                times = [0.0] * (3 * size)
                times[3 * place : 3 * place + 3] = self._last
                told += [*map(float, marks), *times]
            votes = torch.tensor(told, dtype=torch.float64)
            self._votes[over] = (votes, dist.all_reduce(votes, group=group, async_op=True))

    def finish(self) -> list[float]:
        """Wait until all gradients are averaged. Returns the sum of the ranks' ``marks``."""
        self._active = False
        self._send_rest()
        marks, used, again = self._count_votes()
        self._clock.wait_all(self._buckets, self._wait)
        self._hold()
        ended = self._clock.now()
        for bucket in self._buckets:
            if bucket in again:
                self._send_now(bucket)
            bucket.spread(dist.get_world_size(self._group(bucket.over)), used)
        unsent = [(p, over) for p, over in self._all if id(p) in used and id(p) not in self._where]
        for bucket in make_buckets(unsent, self._most):
            self._send_now(bucket)
            bucket.spread(
                dist.get_world_size(self._group(bucket.over)), set(map(id, bucket.parameters))
            )
        if again or unsent:
            self._extra_seconds += self._clock.now() - ended
        self._choose_buckets(used)
        return marks

    def _count_votes(self) -> tuple[list[float], set[int], list[Bucket]]:
        """Returns the sums of marks, ids of the parameters with a gradient on any rank, and the
        buckets to send again."""
        marks: list[float] = []
        used: set[int] = set()
        again: list[Bucket] = []
        for over, (votes, work) in self._votes.items():
            self._wait(work)
            mine = [p for p, each in self._all if each == over]
            buckets = [bucket for bucket in self._buckets if bucket.over == over]
            counts = votes.tolist()
            rest = counts[len(mine) :]
            used.update(id(p) for p, count in zip(mine, counts, strict=False) if count)
            again += [bucket for bucket, dirty in zip(buckets, rest, strict=False) if dirty]
            if over == DATA:
                times = 3 * dist.get_world_size(self._group(DATA))
                marks = rest[len(buckets) : len(rest) - times]
                self._take(rest[len(rest) - times :])
        return marks, used, again

    def _send_now(self, bucket: Bucket) -> None:
        bucket.send(self._group(bucket.over))
        assert bucket.flat is not None
        finish(bucket.work, bucket.flat, self._wait)

    def _choose_buckets(self, used: set[int]) -> None:
        """Buckets of the gradients that there are, once they are known; later with those that
        come in addition."""
        wanted = set(used)
        if self._settled:
            wanted |= {id(p) for p, _ in self._all if id(p) in self._where and p.requires_grad}
        self._settled = True
        if wanted != {*self._where}:
            self._buckets = make_buckets(
                [(p, over) for p, over in self._all if id(p) in wanted], self._most
            )

    def add(self, seconds: float) -> None:
        """Add the time of a reduction elsewhere, such as FSDP's own, all of it exposed."""
        self._extra_seconds += seconds

    def _group(self, over: Over) -> dist.ProcessGroup:
        group = self._world.group(over)
        assert group is not None
        return group

    def _hold(self) -> None:
        """Apply the fault trace, if it has faults of this group."""
        if self._faults is None:
            return
        sent = torch.tensor(self._clock.sent_at() or [0.0], dtype=torch.float64)
        # The network is busy from when the last rank has sent.
        work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._group(DATA), async_op=True)
        self._wait(work)
        sizes = [bucket.nbytes for bucket in self._buckets]
        self._clock.held(self._faults.hold(sent.tolist()[: len(sizes)], sizes, self._iteration))

    def _take(self, times: Sequence[float]) -> None:
        """Take the times of the group's last reduction, if all ranks have one of one iteration."""
        rows = [times[at : at + 3] for at in range(0, len(times), 3)]
        if rows[0][0] >= 0 and all(row[0] == rows[0][0] for row in rows):
            self._reduced = Reduced(
                iteration=int(rows[0][0]),
                bytes=self.nbytes,
                buckets=self._last_buckets,
                seconds=min(row[1] for row in rows),
                exposed=min(row[2] for row in rows),
                waited=self._last[2],
            )

    @property
    def newest(self) -> Reduced | None:
        """What :meth:`take` will return. The same times on all ranks of the group."""
        return self._reduced

    def take(self) -> Reduced | None:
        """The newest reduction of which the times of the whole group are known, once: that of the
        iteration before."""
        found, self._reduced = self._reduced, None
        return found

    def measure(self) -> dict[str, float]:
        """The reduction of this rank in the iteration, after :meth:`finish`: bytes, buckets,
        seconds, and seconds waited after the last op. On a device, waits for it; so call it where
        the device has to be waited for anyway."""
        seconds, exposed = self._clock.measure()
        extra = self._extra_seconds
        self._last = (float(self._iteration), seconds + extra, exposed + extra)
        self._last_buckets = self._sent
        return {
            "bytes": self.nbytes,
            "buckets": self._last_buckets,
            "seconds": round(self._last[1], 6),
            "waited": round(self._last[2], 6),
        }


class _HostClock:
    """When buckets were sent and were there, for collectives of the host. Wall clock, seconds.

    An end that nobody waited for is seen when the next gradient is written, or the last op ends.
    """

    def begin(self) -> None:
        self._ended = 0.0
        self._sent: list[float] = []
        self._done: list[float] = []

    def now(self) -> float:
        return time()

    def end_ops(self) -> None:
        self._ended = time()

    def sends(self, bucket: Bucket) -> None:
        self._sent.append(time())

    def sent(self, bucket: Bucket) -> None:
        """Does nothing: the host sees when it is done."""

    def sent_at(self) -> list[float]:
        return self._sent

    def poll(self, sent: Sequence[Bucket]) -> None:
        """Note the buckets that are there."""
        for bucket in sent[len(self._done) :]:
            if not bucket.work.is_completed():
                break
            self._done.append(time())

    def wait_all(self, buckets: Sequence[Bucket], wait: Wait) -> None:
        for bucket in buckets[len(self._done) :]:
            assert bucket.flat is not None
            finish(bucket.work, bucket.flat, wait)
            self._done.append(time())
        for bucket in buckets:
            # Raises the errors of those that were seen to be done.
            wait(bucket.work)

    def held(self, until: Sequence[float]) -> None:
        """Note the ends that a fault trace sets."""
        self._done = [max(pair) for pair in zip(self._done, until, strict=True)]

    def measure(self) -> tuple[float, float]:
        return _measure(self._sent, self._done, self._ended)


class _DeviceClock:
    """The same of collectives that a device runs, by events. Times count back from the end."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._side: Stream | None = None

    def begin(self) -> None:
        self._ended: Event | None = None
        self._marks: list[tuple[Event, Event]] = []
        self._begun: Event | None = None
        self._host_sent: list[float] = []

    def now(self) -> float:
        return time()

    def end_ops(self) -> None:
        self._ended = self._mark()

    def sends(self, bucket: Bucket) -> None:
        self._host_sent.append(time())
        self._begun = self._mark()

    def sent(self, bucket: Bucket) -> None:
        assert self._begun is not None
        if self._side is None:
            self._side = self._accelerator.new_stream()
        with self._accelerator.using(self._side):
            bucket.work.wait()
        self._marks.append((self._begun, self._accelerator.record(self._side, timed=True)))

    def sent_at(self) -> list[float]:
        return self._host_sent

    def poll(self, sent: Sequence[Bucket]) -> None:
        """Does nothing: events tell it later."""

    def wait_all(self, buckets: Sequence[Bucket], wait: Wait) -> None:
        for bucket in buckets:
            bucket.work.wait()

    def held(self, until: Sequence[float]) -> None:
        """Does nothing: the host was held, and with it what it launches next."""

    def measure(self) -> tuple[float, float]:
        if not self._marks or self._ended is None:
            return 0.0, 0.0
        self._marks[-1][1].synchronize()
        now = self._mark()
        now.synchronize()
        seconds = self._accelerator.seconds
        sent = [-seconds(mark[0], now) for mark in self._marks]
        done = [-seconds(mark[1], now) for mark in self._marks]
        return _measure(sent, done, -seconds(self._ended, now))

    def _mark(self) -> Event:
        return self._accelerator.record(self._accelerator.compute_stream(), timed=True)


def _measure(sent: Sequence[float], done: Sequence[float], ended: float) -> tuple[float, float]:
    """Seconds during which a bucket was under way, and those after ``ended``."""
    busy, free = 0.0, float("-inf")
    for begun, there in zip(sent, done, strict=True):
        busy += max(0.0, there - max(begun, free))
        free = max(free, there)
    return busy, max(0.0, free - ended) if done else 0.0
