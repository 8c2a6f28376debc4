"""Emulated stages: each op holds the interpreter for a given time and computes nothing.

Run it with ``pipemorph run examples/emulated-14b.yaml --out out/emulated``. Times and message sizes
come from ``spec.emulation``. Executor, transports, agent and controller are those of a real model.
``spec.trainer.args``: ``clip`` (true), whether every rank waits for the global gradient norm after
each iteration; ``direct_duplex`` (full), see :class:`~pipemorph_trainer.Pipeline`.
"""

from __future__ import annotations

import sys

from pipemorph.errors import InputError
from pipemorph_trainer import EmulatedStage, ModelShard, Options, Pipeline, TrainerContext


def train(context: TrainerContext) -> None:
    if context.job is None or context.job.spec.emulation is None:
        raise InputError("this example needs a job with spec.emulation; see examples/")
    spec, clip = context.job.spec, context.args.get("clip", True)
    duplex = context.args.get("direct_duplex", "full")
    unknown = set(context.args) - {"clip", "direct_duplex"}
    if unknown or not isinstance(clip, bool) or duplex not in ("full", "half"):
        raise InputError(
            f"spec.trainer.args is {context.args}; this example knows clip: true|false and"
            " direct_duplex: full|half"
        )

    def build_stage(part: ModelShard) -> EmulatedStage:
        layers = spec.parallelism.layers
        # The op times of a stage are proportional to its number of layers.
        share = 1.0 if layers is None else len(part.layers(layers)) * part.stages / layers
        return EmulatedStage.from_spec(spec, stage=part.stage, share=share)

    with Pipeline(build_stage, context=context, options=Options(direct_duplex=duplex)) as pipe:
        for _ in range(pipe.start_iteration, spec.trainer.iterations):
            pipe.step()
            if clip:
                # As in most training, every rank waits for the global gradient norm.
                pipe.clip_grad_norm_(1.0)


def main() -> int:
    try:
        train(TrainerContext.from_env())
    except InputError as error:
        print(f"emulated: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
