"""Tokens per second of a real GPT whose samples have 64 to 1,024 tokens, balanced or not.

One command: ``python benchmarks/gpt_lengths.py [--wall] [--json FILE]``. The model of
:mod:`pipemorph_trainer.examples.gpt`, two replicas of two stages, trains on the same samples
twice: dealt in the order of the permutation, four per microbatch, and by ``BalancedBatchSampler``
with costs that are fitted to the ops of the first run. Both run three times, in turn. Ranks measure
the processor time of each op, and the median of the three counts; the iteration is simulated from
these times, as if each rank had a processor of its own. The wall-clock figures are true only where
that is so: with ``--wall`` two replicas of one stage run, which two processors suffice for, and the
goal is for them.
"""

from __future__ import annotations

import gc
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any

from goals import finish_benchmark, make_parser
from ranks import run_ranks

from pipemorph.planning import Link, Problem, StageTimes, plan, predict
from pipemorph_trainer.data import BalancedBatchSampler, CostModel, fit_costs

WALL = "--wall" in sys.argv
REPLICAS, STAGES, MICROBATCHES, EACH = (2, 1, 2, 4) if WALL else (2, 2, 4, 4)
SAMPLES, WARM_UP, STEPS, ROUNDS = 512, 2, 12, 3
CAPACITY = 4096
"""Tokens of a microbatch's tensors, most of which hold none."""
BATCH = REPLICAS * MICROBATCHES * EACH
DEADLINE_SECONDS = 900
GOAL = 0.8
OPS = ("run_forward", "backward_input", "backward_weight", "run_fused_backward")
Step = list[list[list[int]]]
"""Samples of a step, by replica and microbatch."""


def draw_lengths() -> list[int]:
    """Lengths of the samples: lognormal, as of documents."""
    rng = random.Random(0)
    return [min(1024, max(64, round(math.exp(rng.gauss(5.6, 0.7))))) for _ in range(SAMPLES)]


def deal_steps(model: CostModel | None) -> Iterator[Step]:
    """Samples of each step: balanced by a model of costs, or in the order of the permutation."""
    lengths = draw_lengths()
    prices = [(model or CostModel(per_token=1)).price_sample(length) for length in lengths]
    sampler = BalancedBatchSampler(
        prices, batch_size=BATCH, replicas=REPLICAS, replica=0, microbatches=MICROBATCHES,
        stages=STAGES, base=0.0 if model is None else model.base, sizes=lengths, capacity=CAPACITY,
    )  # fmt: skip
    for step in range(WARM_UP + STEPS):
        if model is not None:
            yield [list(map(list, replica)) for replica in sampler.deal_samples(step).samples]
            continue
        order = iter(sampler.list_samples(step))
        yield [
            [[next(order) for _ in range(EACH)] for _ in range(MICROBATCHES)]
            for _ in range(REPLICAS)
        ]


def rank_main(coefficients: str) -> None:
    """Program of a rank. Rank 0 prints a line of JSON: losses, seconds of each step, and the
    processor time of each op, by rank, step, kind and microbatch."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn import functional

    from pipemorph_trainer import ModelShard, Pipeline, TrainerContext
    from pipemorph_trainer.data import pack_samples
    from pipemorph_trainer.examples.gpt import GPTArguments, GPTStage, load_corpus

    class PackedStage(nn.Module):
        """Stage of the GPT that runs each sample of a packed microbatch by itself."""

        def __init__(self, part: ModelShard) -> None:
            super().__init__()
            self.stage = GPTStage(GPTArguments(width=64, sequence=1024), part, 2 * STAGES)

        def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
            lengths = torch.bincount(numbers[numbers >= 0]).tolist()
            parts = x[:, : sum(lengths)].split(lengths, dim=1)
            out = torch.cat([self.stage(part) for part in parts], dim=1)
            return functional.pad(out, (0, 0, 0, x.shape[1] - out.shape[1]))

    def build_stage(part: ModelShard) -> nn.Module:
        torch.manual_seed(part.stage)
        return PackedStage(part)

    def sum_losses(output: Tensor, target: Tensor) -> Tensor:
        flat = output.flatten(0, 1), target.flatten()
        return functional.cross_entropy(*flat, ignore_index=-100, reduction="sum")

    context = TrainerContext.from_env()
    torch.set_num_threads(1)
    corpus, lengths = load_corpus().long(), draw_lengths()
    stage, replica = divmod(context.rank, REPLICAS)
    values = json.loads(coefficients)
    times: dict[tuple[str, int], float] = {}

    def time_op(name: str, run: Callable[..., Any], microbatch: int, *args: Any, **kw: Any) -> Any:
        began = thread_time()
        found = run(microbatch, *args, **kw)
        times[name, microbatch] = thread_time() - began
        return found

    losses, seconds, measured = [], [], []
    with Pipeline(
        build_stage, context=context, loss_fn=sum_losses, microbatches=MICROBATCHES, stages=STAGES
    ) as pipe:
        runner: Any = next(
            each for each in gc.get_objects() if type(each).__name__ == "ModuleRunner"
        )
        for name in OPS:
            setattr(runner, name, partial(time_op, name, getattr(runner, name)))
        optimizer = torch.optim.SGD(pipe.module.parameters(), lr=0.1)
        for step in deal_steps(CostModel(*values) if values else None):
            samples = [[corpus[i * 1025 :][: lengths[i] + 1] for i in own] for own in step[replica]]
            packed = [pack_samples([row[:-1] for row in own], CAPACITY) for own in samples]
            target = [pack_samples([row[1:] for row in own], CAPACITY, -100)[0] for own in samples]
            times.clear()
            began = perf_counter()
            loss = pipe.step(
                arg_mbs=[(each[None],) for each, _ in packed] if stage == 0 else None,
                kwarg_mbs=[{"numbers": numbers[None]} for _, numbers in packed],
                target_mbs=[each[None] for each in target] if stage == STAGES - 1 else None,
                weight=sum(int((each >= 0).sum()) for each in target),
            )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            seconds.append(perf_counter() - began)
            measured.append(
                [[times.get((name, m), 0.0) for m in range(MICROBATCHES)] for name in OPS]
            )
        every: list[Any] = [None] * context.world_size
        dist.all_gather_object(every, measured)
    if context.rank == 0:
        print(json.dumps([losses, seconds, every]))


def simulate_step(
    problem: Problem, rows: Sequence[Sequence[Sequence[float]]], unit: Sequence[float]
) -> float:
    """Iteration of the last replica. ``rows``: time of each microbatch by replica and stage;
    ``unit``: that of the problem's stages."""
    schedule = plan(problem).schedule
    found = []
    for stages in rows:
        factors = tuple(
            tuple(each / whole for each in row) for row, whole in zip(stages, unit, strict=True)
        )
        varied = problem.model_copy(update={"microbatch_costs": factors})
        found.append(predict(schedule, varied.with_microbatch_order(())))
    return max(found)


def read_totals(every: Any, step: int) -> list[list[list[float]]]:
    """Processor time of all ops of each microbatch of a step, by replica and stage."""
    return [
        [
            [sum(kind[m] for kind in every[s * REPLICAS + r][step]) for m in range(MICROBATCHES)]
            for s in range(STAGES)
        ]
        for r in range(REPLICAS)
    ]


def run_job(model: CostModel | None) -> Any:
    values = [] if model is None else [model.base, model.per_token, model.per_square]
    arguments = [json.dumps(values), *(["--wall"] if WALL else [])]
    printed = run_ranks(__file__, STAGES * REPLICAS, arguments, DEADLINE_SECONDS)
    return json.loads(printed.splitlines()[-1])


def take_medians(values: Sequence[Any]) -> Any:
    """Take the median of each number over equal nested lists."""
    if not isinstance(values[0], list):
        return median(values)
    return [take_medians(each) for each in zip(*values, strict=True)]


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2])
        return 0
    parser = make_parser(__doc__)
    parser.add_argument("--wall", action="store_true", help="a rank per processor, on two")
    args = parser.parse_args()
    lengths = draw_lengths()
    counted = range(WARM_UP, WARM_UP + STEPS)
    runs = {"in order": (run_job(None), list(deal_steps(None)))}
    _, _, every = runs["in order"][0]
    pairs = [
        ([lengths[i] for i in own], fmean(row[m] for row in stages))
        for step in counted
        for samples, stages in zip(runs["in order"][1][step], read_totals(every, step), strict=True)
        for m, own in enumerate(samples)
    ]
    model = fit_costs([row for row, _ in pairs], [took for _, took in pairs])
    rounds: list[list[Any]] = [[runs["in order"][0]], []]
    for _ in range(ROUNDS - 1):
        rounds[1].append(run_job(model))
        rounds[0].append(run_job(None))
    rounds[1].append(run_job(model))
    runs["in order"] = take_medians(rounds[0]), runs["in order"][1]
    runs["balanced"] = take_medians(rounds[1]), list(deal_steps(model))
    # Stage times of a mean microbatch, of both runs together.
    means = [
        [
            fmean(sum(every[s * REPLICAS + r][k][kind]) / MICROBATCHES
                  for (_, _, every), _ in runs.values() for r in range(REPLICAS) for k in counted)
            for kind in range(len(OPS))
        ]
        for s in range(STAGES)
    ]  # fmt: skip
    stages = tuple(
        StageTimes(forward=f, backward_input=b + whole / 2, backward_weight=w + whole / 2)
        for f, b, w, whole in means
    )
    unit = [sum(kinds) for kinds in means]
    problem = Problem(microbatches=MICROBATCHES, stages=stages, links=(Link(),) * (STAGES - 1))
    tokens = sum(lengths[i] for k in counted for r in runs["balanced"][1][k] for m in r for i in m)
    figures: dict[str, dict[str, float]] = {}
    for name, ((_, seconds, every), dealt) in runs.items():
        simulated = sum(simulate_step(problem, read_totals(every, k), unit) for k in counted)
        expected = 0.0
        for k in counted:
            priced = [
                [[model.price_microbatch([lengths[i] for i in own]) for own in samples]] * STAGES
                for samples in dealt[k]
            ]
            expected += simulate_step(problem, priced, [fmean(unit)] * STAGES)
        figures[name] = {
            "measured": tokens / simulated, "expected": tokens / expected,
            "wall": tokens / sum(seconds[WARM_UP:]),
        }  # fmt: skip
    gain = {
        kind: figures["balanced"][kind] / figures["in order"][kind] for kind in figures["balanced"]
    }
    losses = [run[0] for run, _ in runs.values()]
    apart = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    print("tokens per second:")
    print("| samples | from measured ops | from fitted costs | by the wall clock |")
    print("|---|---|---|---|")
    for name, row in figures.items():
        print(f"| {name} | {row['measured']:,.0f} | {row['expected']:,.0f} | {row['wall']:,.0f} |")
    print(f"| gain | {gain['measured']:.2f}× | {gain['expected']:.2f}× | {gain['wall']:.2f}× |")
    found, bound, name = gain["measured"], gain["expected"], "fitted costs"
    if WALL:
        found, bound, name = gain["wall"], gain["measured"], "measured ops, by the wall clock"
    share = (found - 1) / (bound - 1)
    goals = [
        (f"share of the gain from {name}: {share:.2f}; goal {GOAL}", share >= GOAL),
        (f"losses per token differ by at most {apart:.1e}; goal 1e-4", apart <= 1e-4),
    ]
    result = {"figures": figures, "gain": gain, "losses_apart": apart}
    return 0 if finish_benchmark(goals, args.json, result) else 1


if __name__ == "__main__":
    sys.exit(main())
