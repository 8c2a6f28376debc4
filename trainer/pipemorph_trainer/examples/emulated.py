"""Emulated stages: each op holds the interpreter for a given time and computes nothing.

Run it with ``pipemorph run examples/emulated-14b.yaml --out out/emulated``. Times and message sizes
come from ``spec.emulation``. Executor, transports, agent and controller are those of a real model.
``spec.trainer.args``: ``clip`` (true), whether every rank waits for the global gradient norm after
each iteration; ``direct_duplex`` (full), see :class:`~pipemorph_trainer.Pipeline`; ``work_spread``
(0), coefficient of variation of the microbatches' work, drawn anew in each iteration; ``costs``
(true), whether the pipeline gets that work as the costs of the microbatches.
"""

from __future__ import annotations

import math
import random
import sys

from pipemorph.errors import InputError
from pipemorph_trainer import EmulatedStage, ModelShard, Options, Pipeline, TrainerContext

MOST_SPREAD = 2


def train(context: TrainerContext) -> None:
    if context.job is None or context.job.spec.emulation is None:
        raise InputError("this example needs a job with spec.emulation; see examples/")
    spec, clip = context.job.spec, context.args.get("clip", True)
    duplex = context.args.get("direct_duplex", "full")
    spread, costs = context.args.get("work_spread", 0), context.args.get("costs", True)
    unknown = set(context.args) - {"clip", "direct_duplex", "work_spread", "costs"}
    flags = isinstance(clip, bool) and isinstance(costs, bool)
    numbers = isinstance(spread, (int, float)) and 0 <= spread <= MOST_SPREAD
    if unknown or not (flags and numbers) or duplex not in ("full", "half"):
        raise InputError(
            f"spec.trainer.args is {context.args}; this example knows clip: true|false,"
            f" direct_duplex: full|half, work_spread: 0 to {MOST_SPREAD} and costs: true|false"
        )

    def build_stage(part: ModelShard) -> EmulatedStage:
        layers = spec.parallelism.layers
        # The op times of a stage are proportional to its number of layers.
        share = 1.0 if layers is None else len(part.layers(layers)) * part.stages / layers
        return EmulatedStage.from_spec(spec, stage=part.stage, share=share)

    with Pipeline(build_stage, context=context, options=Options(direct_duplex=duplex)) as pipe:
        for iteration in range(pipe.start_iteration, spec.trainer.iterations):
            if spread:
                # One seed for all ranks of a column.
                seed = f"{pipe.coordinate.column} {iteration}"
                work = draw_work(spec.schedule.microbatches, spread, seed)
                pipe.step(work=work, costs=work if costs else None)
            else:
                pipe.step()
            if clip:
                # As in most training, every rank waits for the global gradient norm.
                pipe.clip_grad_norm_(1.0)


def draw_work(microbatches: int, spread: float, seed: str) -> list[float]:
    """Draw the work of each microbatch: lognormal, mean 1, coefficient of variation ``spread``."""
    variance = math.log(1 + spread**2)
    rng = random.Random(seed)
    return [rng.lognormvariate(-variance / 2, math.sqrt(variance)) for _ in range(microbatches)]


def main() -> int:
    try:
        train(TrainerContext.from_env())
    except InputError as error:
        print(f"emulated: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
