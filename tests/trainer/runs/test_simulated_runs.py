"""Whole runs on a simulated device: results equal a sequential run to the bit.

Stages compute on the CPU; their messages cross host memory as those of a device do, with copies
that are done later and in random order. Ranks, engine, executor and commit are the real ones.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from launch import Ranks, run_ranks
from pairwise import give_tiers
from simulated_device import Driver, SimulatedDevice
from simulated_runs import seat
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.errors import InputError
from pipemorph.planning import OpKind, Route
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import TrainerContext, startup
from pipemorph_trainer.devices import choose_device
from pipemorph_trainer.executor.device_times import (
    MAX_QUEUED_OPS,
    DeviceTimes,
    LossCopy,
    MeasuredCopy,
    MeasuredOp,
)
from pipemorph_trainer.schedule import iteration, pipeline_builder
from pipemorph_trainer.startup import StartupInfo
from pipemorph_trainer.topology import mesh
from pipemorph_trainer.transport import rendezvous
from pipemorph_trainer.transport.channels.direct import DirectIncoming


def simulate(context: TrainerContext, job: Job, seed: int) -> tuple[Record, int, list[str]]:
    """Train on a simulated device; also the bytes copied and the threads that were there."""
    device = SimulatedDevice(prompt=True)
    driver = Driver(device, seed + context.rank)
    seat(device)
    record = train(context, job)
    threads = [thread.name for thread in threading.enumerate()]
    driver.close()
    assert not device.registered, "memory stayed page-locked"
    return record, sum(nbytes for _, nbytes in device.copied), threads


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("policy", "engine", "dispatch"),
    give_tiers(
        [
            ("pipemorph", "tcp", "guided"),
            ("1f1b", "tcp", "static"),
            ("pipemorph", "tcp", "guided"),
            ("pipemorph", "shm", "static"),
            ("gpipe", "shm", "guided"),
        ],
        test=1,
        full=4,
    ),
)
def test_delegated_runs(policy: str, engine: str, dispatch: str) -> None:
    job = Job(3, 6, policy=policy, dispatch=dispatch, route="delegated", engine=engine)
    found = run_ranks(3, simulate, job, 7, timeout=100)
    assert_same([record for record, _, _ in found], reference(Job(3, 6)))
    for _, nbytes, threads in found:
        assert nbytes > 0, "nothing crossed the device"
        assert not [name for name in threads if name.startswith("pipemorph-to-")], threads


@pytest.mark.needs_engine
def test_switching_between_routes() -> None:
    job = Job(3, 6, policy="1f1b", route="auto", iterations=6)
    moved = make_plan(job, 2, "zero-bubble", routes=(Route.DELEGATED, Route.DIRECT))
    job = job.with_(switches=((0, moved, (0, 1, 2)),))
    found = run_ranks(3, simulate, job, 11, timeout=100)
    records = [record for record, _, _ in found]
    assert_same(records, reference(Job(3, 6, iterations=6)))
    assert all(record.versions == records[0].versions for record in records)
    assert records[0].versions[1:] == [2, 2, 2, 2, 2]


def _fail_in_mid_run(context: TrainerContext, job: Job) -> None:
    device = SimulatedDevice(prompt=True)
    Driver(device, context.rank)
    seat(device)
    if context.rank == 1:
        copy = device.copy_tensor

        def breaks(*args: Any) -> None:
            if len(device.copied) > 20:
                device.fail("CUDA error: uncorrectable ECC error encountered")
            copy(*args)

        vars(device)["copy_tensor"] = breaks
    train(context, job)


@pytest.mark.needs_engine
def test_a_device_that_fails_ends_the_run_in_words() -> None:
    job = Job(3, 6, route="delegated", engine="tcp", iterations=20)
    ranks = Ranks(3, _fail_in_mid_run, job).wait(100)
    assert all(rank.exitcode == 1 for rank in ranks), [rank.exitcode for rank in ranks]
    assert "CUDA error: uncorrectable ECC error" in ranks[1].error
    for neighbour in (ranks[0], ranks[2]):
        assert "rank 1 (stage 1)" in neighbour.error


def _plain(context: TrainerContext) -> list[str]:
    """Parts of the links of a delegated run on the CPU."""
    kinds: list[str] = []
    meet = rendezvous.connect_neighbours

    def met(*args: Any, **options: Any) -> Any:
        neighbours = meet(*args, **options)
        assert neighbours.staging is None
        for end in neighbours.ends:
            kinds.append(type(end._incoming[Route.DELEGATED]).__name__)
            kinds.append(type(end._outgoing[Route.DELEGATED]).__name__)
        return neighbours

    pipeline_builder.connect_neighbours = met  # type: ignore[assignment]
    train(context, Job(2, 4, route="delegated"))
    return kinds


@pytest.mark.full
@pytest.mark.needs_engine
def test_the_cpu_needs_none_of_it() -> None:
    assert run_ranks(2, _plain) == [["DelegatedIncoming", "DelegatedOutgoing"]] * 2


# --- times and losses of a device ----------------------------------------------------------------


ROUNDING = 1e-5
"""Error of differences between wall-clock times, seconds."""


class Kernel:
    """Work on a device; when it ran, by the clock of simulated events."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.began = self.ended = 0.0

    def __call__(self) -> None:
        self.began = time.perf_counter()
        threading.Event().wait(self._seconds)
        self.ended = time.perf_counter()

    @property
    def took(self) -> float:
        return self.ended - self.began


def test_ops_are_timed_where_they_run() -> None:
    """The host launches both ops at once; the device runs them later, one after the other."""
    device = SimulatedDevice()
    times = DeviceTimes(device)
    first, second = kernels = Kernel(0.03), Kernel(0.06)
    ops = []
    for index, kernel in enumerate(kernels):
        times.mark_op_start()
        device.launch(kernel)
        times.mark_op_end()
        ops.append(MeasuredOp(OpKind.F, index, 0.0, 0.0))
    threading.Event().wait(0.05)
    began = time.perf_counter()
    driver = Driver(device, 0)
    resolved = times.resolve_ops(ops)
    ended = time.perf_counter()
    driver.close()
    assert [(op.kind, op.microbatch) for op in resolved] == [(OpKind.F, 0), (OpKind.F, 1)]
    took = [op.end - op.start for op in resolved]
    assert first.took - ROUNDING <= took[0] <= second.began - began + ROUNDING
    assert second.took - ROUNDING <= took[1] <= ended - first.ended + ROUNDING
    assert resolved[0].end <= resolved[1].start
    # The next iteration starts anew.
    assert not times._marks


def test_a_copy_back_is_timed_where_it_runs_and_one_during_compute_takes_nothing() -> None:
    device = SimulatedDevice()
    times = DeviceTimes(device)
    times.mark_op_start()
    with times.mark_copy():
        device.record_event(device.new_stream())
    kernel = Kernel(0.05)
    with times.mark_copy():
        device.launch(kernel)
    times.mark_op_end()
    copies = [MeasuredCopy(OpKind.F, 0, 0.0, 9.0, 1), MeasuredCopy(OpKind.B, 0, 0.0, 9.0, 1)]
    began = time.perf_counter()
    driver = Driver(device, 0)
    (op,) = times.resolve_ops([MeasuredOp(OpKind.B, 0, 0.0, 0.0)])
    out, back = times.resolve_copies(copies)
    driver.close()
    assert out.end - out.start <= kernel.began - began + ROUNDING
    assert kernel.took - ROUNDING <= back.end - back.start <= op.end - op.start + ROUNDING
    assert not times._copies


def test_an_op_is_chosen_when_the_device_needs_it() -> None:
    device = SimulatedDevice()
    times = DeviceTimes(device)
    for _ in range(MAX_QUEUED_OPS + 1):
        times.wait_for_device()
        times.mark_op_start()
        times.mark_op_end()
    waited = threading.Thread(target=times.wait_for_device)
    waited.start()
    waited.join(0.1)
    assert waited.is_alive(), "the next op was chosen before the device had begun the last"
    device.run()
    waited.join(10)
    assert not waited.is_alive()


def test_losses_cross_behind_their_ops_and_exactly() -> None:
    device = SimulatedDevice()
    values = torch.tensor([0.1, 1e-7, 3.25, 2.0 / 3.0])
    losses = [device.tensor(value.reshape(())) for value in values]
    device.run()
    copy = LossCopy(device, losses)
    assert not copy.is_complete()
    device.run()
    assert copy.is_complete()
    assert copy.wait_for_losses() == [float(value) for value in values]


def test_torch_without_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.dist, "is_gloo_available", lambda: False)
    context = TrainerContext(
        rank=0, world_size=2, local_rank=0, master_addr="127.0.0.1", master_port=1
    )
    with pytest.raises(InputError, match="without gloo, over which ranks agree on plans"):
        startup.join_job(
            context, torch.device("cuda", 0), StartupInfo(mesh=MeshShape(2), microbatches=1)
        )


@pytest.mark.parametrize(
    ("gpus", "ranks", "local_rank", "expected"),
    [(0, "2", 1, "cpu"), (1, "2", 0, "cpu"), (2, "2", 1, "cuda:1"), (8, None, 3, "cuda:3")],
)
def test_a_rank_takes_a_gpu_that_it_need_not_share(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: str | None, local_rank: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert choose_device(local_rank) == torch.device(expected)
    shared = "cpu" if not gpus else f"cuda:{local_rank % gpus}"
    assert choose_device(local_rank, share=True) == torch.device(shared)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(InputError, match="LOCAL_WORLD_SIZE is 'two'"):
        choose_device(local_rank)


def _direct(context: TrainerContext, job: Job) -> tuple[Record, int, list[str]]:
    """Train on a simulated device; also count departures that its neighbours sent this rank, and
    the threads that remain."""
    device = SimulatedDevice(prompt=True)
    driver = Driver(device, context.rank)
    seat(device)
    departed, hear = 0, DirectIncoming._apply_send_timestamps

    def count_departures(self: Any, direction: int, departures: Any) -> None:
        nonlocal departed
        departed += len(departures)
        hear(self, direction, departures)

    DirectIncoming._apply_send_timestamps = count_departures  # type: ignore[method-assign]
    iteration.PLAN_POLL_SECONDS = 0.0  # The iterations are short.
    record = train(context, job)
    threads = [thread.name for thread in threading.enumerate()]
    driver.close()
    return record, departed, threads


@pytest.mark.full
def test_ranks_send_departure_times_of_messages_of_the_direct_route() -> None:
    job = Job(3, 6, policy="1f1b", route="direct", iterations=5)
    found = run_ranks(3, _direct, job, timeout=100)
    assert_same([record for record, _, _ in found], reference(job))
    for rank, (_, departed, threads) in enumerate(found):
        messages = 5 * 6 * (2 if rank == 1 else 1)
        assert messages / 2 < departed <= messages, (rank, departed)
        assert "pipemorph-departures" not in threads
