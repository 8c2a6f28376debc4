"""Activations in host memory: equal bits, and memory that is really freed if none holds it."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from gate import same_bits
from simulated_device import SimulatedDevice
from split_support import (
    Job,
    Lambda,
    Result,
    assert_equal,
    host_store,
    output_grads,
    random_order,
    run_order,
    sequential,
    split,
)
from test_split_property import WIDTH as STACK_WIDTH
from test_split_property import stack
from test_split_zoo import DELAYED, ZOO, Block, vectors
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipemorph.planning import Op, OpKind, Schedule, ScheduleError, validate
from pipemorph.planning.offload import DeviceResidency
from pipemorph_trainer.backward import OpOrderError, SplitError
from pipemorph_trainer.backward.forward_replay import digest_tensor
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.memory.activation_store import (
    ActivationStore,
    SavedActivations,
    SideStreamCopier,
)
from pipemorph_trainer.memory.host_pool import HostPool

WIDTH = 8
ALL_FIRST = "F0 F1 F2 F3 F4 F5 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5"


class Storages(TorchDispatchMode):
    """Record of every storage that ops made while it was on, and which of them are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and id_of(leaf) not in given:
                ref = StorageWeakRef(leaf.untyped_storage())
                self.made[ref.cdata] = (ref, leaf.untyped_storage().nbytes())
        return out

    def live(self) -> int:
        self.made = {k: v for k, v in self.made.items() if not v[0].expired()}
        return sum(nbytes for _, nbytes in self.made.values())


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def runner_of(module: nn.Module, microbatches: int = 3, **options: Any) -> ModuleRunner:
    options = {"is_first": False, "is_last": False, "store": host_store()} | options
    runner = ModuleRunner(module, microbatches=microbatches, **options)
    runner._call.writes_input = False  # Otherwise the first F gets a copy.
    return runner


def away(runner: ModuleRunner, microbatch: int, args: tuple[Any, ...], **options: Any) -> int:
    """F and its copy out, as the executor does them: it holds the arguments no longer."""
    held = list(args)
    del args
    sent = runner.run_forward(microbatch, held, offload=True, **options)
    held.clear()
    del sent
    return runner.offload_activations(microbatch)


TELLING = (
    "gpt block", "gpt block, bf16", "gpt block, first stage", "language model, one stage",
    "tied embedding and head", "checkpoint, non-reentrant", "checkpoint, reentrant",
    "view output: a transpose last", "autograd.Function at the output", "compiled submodule",
    "hooks on parameters", "dropout", "BatchNorm", "convolutions with a small head",
    "autocast, Linear used twice", "spectral norm", "several outputs, one of integers",
    "several inputs, one of integers", "input passed through", "in-place ops",
    "in-place ops on the input", "multi-head attention", "saves its own input",
    "input not contiguous", "column-major input", "gradient inside the forward",
)  # fmt: skip
HOW = ("offloads", "recomputes")
"""Activations beyond a device limit go to host memory, or are computed again."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[pytest.mark.full] * each.startswith("compiled"))
        for each in TELLING
    ],
)
@pytest.mark.parametrize("how", HOW)
def test_every_kind_of_stage_has_its_bits(how: str, name: str) -> None:
    """The stages have activations that came back, and forwards that ran again."""
    torch.manual_seed(1)
    job = replace(ZOO[name]().job, **{how: True})
    want = sequential(job)
    got, runner = split(job, DELAYED, device_limit=2)
    assert_equal(want, got)
    assert runner.measured.offload_refusal == "" and runner.measured.input_bytes > 0
    again, _ = split(job, "F0 F1 F2 BW0 BW1 BW2", device_limit=1)
    assert_equal(want, again)


@pytest.mark.parametrize("mode", ["auto", "fused"])
@pytest.mark.parametrize("seed", range(8))
def test_random_stacks_orders_and_limits(mode: str, seed: int) -> None:
    rng = random.Random(f"{seed} {mode}")
    torch.manual_seed(seed)
    width = STACK_WIDTH
    module = nn.Sequential(nn.LayerNorm(width), stack(rng, 2), nn.Linear(width, width))
    n = rng.randint(3, 6)

    def make_args(k: int) -> tuple[Tensor, ...]:
        return (torch.randn(3, 2, width, generator=torch.Generator().manual_seed(k)),)

    job = Job(module, make_args, n, mode=mode, offloads=True, is_first=rng.random() < 0.3)
    while True:
        order, limit = random_order(n, rng), rng.randint(1, 3)
        ops = [Op(OpKind(op[0]), int(op[1:])) for op in order.split()]
        try:
            validate(Schedule(n, (tuple(ops),)), None, [limit])
        except ScheduleError:
            continue
        break
    got, runner = split(job, order, device_limit=limit)
    assert_equal(sequential(job), got)
    assert runner._store is not None and runner._store.pool.blocks_in_use == 0


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", ["auto", "fused"])
def test_the_device_holds_two_microbatches_and_inputs(mode: str, how: str) -> None:
    """D=2 under a cap of 6: existing storages that ops have made, after every op."""

    def held_after_ops(limit: int | None) -> list[int]:
        torch.manual_seed(0)
        job = Job(nn.Sequential(Block(), Block()), vectors, 6, mode=mode, **{how: True})
        runner, offloads = job.runner(), how == "offloads"
        for _ in range(2):  # The first F gets a copy, the second one goes out and back.
            runner.run_forward(0, job.make_args(0))
            runner.discard_microbatches()
        held, watch, result, seen = DeviceResidency(limit), Storages(), Result(), []
        for op in ALL_FIRST.split():
            kind, k = op[0], int(op[1:])
            leaves = held.record_op(OpKind(kind), k)
            if kind == "F":
                with watch:
                    made = list(job.make_args(k))
                    outs = runner.run_forward(k, made, **{how.removesuffix("s"): leaves})
                if offloads:  # Else the runner needs them again.
                    made.clear()
                result.outputs.append(tuple(out.detach().clone() for out in outs))
                del made, outs
                if leaves and offloads:
                    assert runner.offload_activations(k) == runner.measured.activation_bytes
            elif kind == "B":
                if leaves:
                    with watch:
                        (runner.fetch_activations if offloads else runner.recompute_forward)(k)
                runner.backward_input(k, output_grads(result.outputs[k], k))
            else:
                runner.backward_weight(k)
            seen.append(watch.live())
        return seen

    without, limited = held_after_ops(None), held_after_ops(2)
    one = without[0]
    inputs = 0 if how == "offloads" else vectors(0)[0].nbytes + digest_tensor(vectors(0)[0]).nbytes
    assert max(without) == 6 * one, "all six, where nothing leaves"
    assert limited[0] == one
    assert limited[5] == one + 5 * inputs < 2 * one, "after the last F, one has stayed"
    assert max(limited) <= 2 * one + 4 * inputs
    assert limited[-1] == 0


def test_what_somebody_else_holds_stays() -> None:
    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        y = m.linear(x) * m.scale * mask
        return torch.tanh(y * m.table) * y

    scale, table = nn.Buffer(torch.full((WIDTH,), 2.0)), torch.randn(5, WIDTH)
    module = Lambda(forward, linear=nn.Linear(WIDTH, WIDTH), scale=scale, table=table)
    runner = runner_of(module, is_first=True)
    batch = torch.randn(12, 5, WIDTH)
    mask = torch.rand(12, 5, 1)
    pointers = [t.data_ptr() for t in (batch, mask, module.table, module.scale)]
    one = 4 * 5 * WIDTH * 4
    moved = away(runner, 0, (batch[:4], mask[:4]))
    # y and the tanh's output; not the batch, the mask, the table and the buffer.
    assert moved == 2 * one
    assert [t.data_ptr() for t in (batch, mask, module.table, module.scale)] == pointers
    runner.fetch_activations(0)
    runner.run_fused_backward(0, (torch.ones(4, 5, WIDTH),))
    got = copy.deepcopy(module.linear.weight.grad)
    module.zero_grad()
    module(batch[:4], mask[:4]).backward(torch.ones(4, 5, WIDTH))
    same_bits(got, module.linear.weight.grad)


def test_views_of_one_storage_go_once_and_come_back_as_views() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.linear(x).chunk(3, dim=-1)
        return q * k.transpose(-1, -2).transpose(-1, -2) * v

    chunks = Lambda(forward, linear=nn.Linear(WIDTH, 3 * WIDTH))
    job = Job(chunks, vectors, 3, mode="fused", offloads=True)
    runner = runner_of(job.module)
    x = vectors(0)[0]
    rows = x.numel() // WIDTH
    result = Result()
    moved = run_order(job, runner, "F0", result, 1)
    # x, the three chunks' one storage, and q * k: each once.
    assert moved == rows * (WIDTH + 3 * WIDTH + WIDTH) * 4
    runner.fetch_activations(0)
    storages = {
        id_of(saved.tensor)
        for ref in runner._flights[0].saved.saved
        if (saved := ref()) is not None and saved.tensor.dim() == 3
    }
    assert len(storages) == 3
    got, _ = split(job, "F0 F1 F2 B0 W0 B1 W1 B2 W2", device_limit=1)
    assert_equal(sequential(job), got)


@pytest.mark.parametrize("when", ["in the forward", "before the copy", "after it came back"])
def test_writes_in_place_are_still_refused(when: str) -> None:
    """torch does not check under hooks: plain autograd would raise here."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.hidden = torch.exp(m.linear(x))
        if when == "in the forward":
            m.hidden.detach().zero_()
        return m.hidden * 2

    module = Lambda(forward, linear=nn.Linear(WIDTH, WIDTH))
    runner = runner_of(module)
    runner.run_forward(0, vectors(0), offload=True)
    if when == "before the copy":
        module.hidden.detach().zero_()
    runner.offload_activations(0)
    runner.fetch_activations(0)
    if when == "after it came back":
        for ref in runner._flights[0].saved.saved:
            saved = ref()
            if saved is not None and not isinstance(saved.tensor, nn.Parameter):
                saved.tensor.zero_()
    with pytest.raises(SplitError, match=r"shape \(4, 5, 8\).* written in place"):
        runner.run_fused_backward(0, vectors(1))


def test_a_branch_that_autograd_dropped_is_not_moved() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        torch.exp(x * 3).sum()
        return torch.tanh(m.linear(x))

    one = 4 * 5 * WIDTH * 4
    runner = runner_of(Lambda(forward, linear=nn.Linear(WIDTH, WIDTH)))
    moved = away(runner, 0, vectors(0))
    assert moved == 2 * one, "x and tanh's output"


def test_a_stage_that_reads_its_input_later_keeps_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        before, m.last = m.last, x
        return torch.tanh(m.linear(x) + (0 if before is None else before.detach().sum()))

    remembers = Lambda(forward, linear=nn.Linear(WIDTH, WIDTH), last=None)
    job = Job(remembers, vectors, 3, offloads=True)
    want = sequential(job)
    got, _ = split(job, "F0 F1 F2 B0 W0 B1 W1 B2 W2", device_limit=1)
    assert_equal(want, got)


def test_activations_go_out_and_back_once_as_a_test() -> None:
    runner = runner_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    for k in range(3):
        assert (runner.measured.copy_seconds is not None) == (k == 2)
        runner.run_forward(k, vectors(k))
    assert 0 < runner.measured.copied_bytes <= runner.measured.activation_bytes
    assert runner._store is not None and runner._store.pool.blocks_in_use == 0
    for k in range(3):
        runner.run_fused_backward(k, vectors(1))
    little = runner_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), store=host_store(100))
    for k in range(3):
        little.run_forward(k, vectors(k))
        assert ("expected at most 100 bytes" in little.measured.offload_refusal) == (k > 0)
    little.run_fused_backward(0, vectors(1))


def test_activations_that_come_back_otherwise_are_an_error() -> None:
    class Broken(ActivationStore):
        def fetch_activations(self, flight: SavedActivations) -> int:
            moved = super().fetch_activations(flight)
            for ref in flight.saved:
                if (saved := ref()) is not None and saved.tensor is not None:
                    saved.tensor.data = saved.tensor + 1
            return moved

    runner = runner_of(nn.Linear(WIDTH, WIDTH), store=Broken(torch.device("cpu"), None))
    runner.run_forward(0, vectors(0))
    with pytest.raises(PipelineError, match="came back from host memory with other values"):
        runner.run_forward(1, vectors(1))


def test_ops_out_of_order_are_refused_by_name() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(SplitError, match="no host memory for activations"):
        runner_of(module, store=None).run_forward(0, vectors(0), offload=True)
    runner = runner_of(module)
    runner.run_forward(0, vectors(0))
    with pytest.raises(SplitError, match="F0 was not run with offload"):
        runner.offload_activations(0)
    with pytest.raises(OpOrderError, match="microbatch 0 are not in host memory"):
        runner.fetch_activations(0)
    away(runner, 1, vectors(1))
    runner.run_fused_backward(0, vectors(2))
    with pytest.raises(OpOrderError, match="B1 before its activations came"):
        runner.backward_input(1, vectors(2))
    runner.fetch_activations(1)
    with pytest.raises(OpOrderError, match="microbatch 1 are not in host memory"):
        runner.fetch_activations(1)
    away(runner, 2, vectors(1))
    assert runner._store is not None and runner._store.pool.blocks_in_use == 1
    runner.discard_microbatches()
    assert runner._store.pool.blocks_in_use == 0


def test_the_pool_is_registered_once_and_keeps_its_limit() -> None:
    device = SimulatedDevice()
    pool = HostPool(4096, device)
    first, second = pool.take_block(1000), pool.take_block(1500)
    assert (first.nbytes, second.nbytes, pool.nbytes) == (1024, 1536, 2560)
    pool.return_block(first)
    assert pool.take_block(600) is first, "used again, though less is requested"
    words = r"2048 bytes are needed in addition to .*2 microbatches.*at most 4096"
    with pytest.raises(PipelineError, match=words):
        pool.take_block(2000)
    pool.return_block(second)
    grown = pool.take_block(2000)
    assert pool.nbytes == 1024 + 2048, "a block that is too small makes room"
    assert len(device.ever_registered) == 3 and len(device.registered) == 2
    pool.return_block(first)
    pool.return_block(grown)
    pool.close()
    assert pool.nbytes == 0 and not device.registered
    refusing = HostPool(None, SimulatedDevice(register_refuses="out of memory"))
    with pytest.raises(PipelineError, match="cannot be page-locked: out of memory; check `ulimit"):
        refusing.take_block(1)
    assert refusing.nbytes == 0


def test_a_full_pool_changes_nothing() -> None:
    runner = runner_of(nn.Linear(WIDTH, WIDTH), store=host_store(100))
    runner.run_forward(0, vectors(0), offload=True)
    with pytest.raises(PipelineError, match="expected at most 100 bytes"):
        runner.offload_activations(0)
    (grad,) = runner.run_fused_backward(0, vectors(1))
    assert grad is not None


@pytest.mark.parametrize("seed", range(20))
def test_streams_in_any_order_give_every_byte_back(seed: int) -> None:
    """Copies of the device run late: no tensor's memory is given on before it has been read, no
    block is overwritten before it has been read back."""
    rng = random.Random(seed)
    device = SimulatedDevice()
    pool, copies = HostPool(None, device), SideStreamCopier(device)
    held: list[tuple[Any, list[tuple[int, int]], list[Tensor]]] = []
    came: list[tuple[Tensor, Tensor]] = []

    def some(steps: int) -> None:
        for _ in range(steps):
            if ready := device.runnable():
                device.step(rng.choice(ready))

    for _ in range(40):
        if len(held) < 4 and rng.random() < 0.6:
            copies.reclaim_memory()
            values = [torch.randint(0, 200, (512,), dtype=torch.uint8) for _ in range(2)]
            made = [device.tensor(value) for value in values]
            block = pool.take_block(1024)
            copies.copy_out(block, [(0, made[0]), (512, made[1])])
            held.append((block, [(0, 512), (512, 512)], values))
            del made
        elif held:
            block, sizes, values = held.pop(0)
            for memory, value in zip(copies.copy_back(block, sizes), values, strict=True):
                # Read by a kernel behind it, which is what a backward is.
                seen = torch.zeros(512, dtype=torch.uint8)
                device.launch(lambda to=seen, of=memory: to.copy_(of))
                came.append((seen, value))
            pool.return_block(block)
        some(rng.randint(0, 6))
    device.run()
    assert len(came) > 10
    for found, value in came:
        same_bits(found, value)
    assert {name for name, _ in device.copied} == {"compute", "side 1"}
