"""``pipemorph init [DIR]``: writes a manifest and a training script that run as they are."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipemorph.argument_types import whole_number_type
from pipemorph.errors import InputError
from pipemorph.manifest import parse_job
from pipemorph.spec.status_base import MAX_STAGES
from pipemorph.yaml_json import display_name

MANIFEST, SCRIPT = "job.yaml", "train.py"
MODELS = ("own", "gpt")
STAGES, ITERATIONS = 2, 40
MICROBATCHES_PER_STAGE = 8
"""Enough to keep a pipeline busy."""
MOST_MICROBATCHES = 1024
LAYERS, SAMPLES = 8, 32
"""Size of the own model: its layers at least, and the samples of a microbatch."""

JOB = """\
# pipemorph run {manifest} --out out
# pipemorph serve {manifest} --out out-torchrun -- torchrun --nproc-per-node {stages} {script}
apiVersion: pipemorph.io/v1alpha1
kind: PipeMorphJob
metadata: {{name: {name}}}
spec:
  parallelism: {{stages: {stages}}}
  schedule: {{microbatches: {microbatches}}}
  trainer: {{command: [python, {script}], iterations: {iterations}}}
  # A link that is slow for a while, to see the schedule adapt:
  # faults:
  #   - {{link: 0, fromIteration: 10, toIteration: 25, delayForwards: 4}}
"""
OWN = '''\
"""A stack of layers learns to shift its input by one place."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipemorph_trainer import Pipeline, TrainerContext

WIDTH, LAYERS, BATCH = 1024, {layers}, {batch}


def build_stage(part):
    """The layers that this rank holds; ``part`` says which."""
    torch.manual_seed(part.stage)  # other weights on each stage
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in part.layers(LAYERS))
    )


def make_optimizer(stage):
    return torch.optim.AdamW(stage.parameters(), lr=1e-3)


context = TrainerContext.from_env()
with Pipeline(build_stage, context=context, loss_fn=mse_loss, optimizer=make_optimizer) as pipe:
    for iteration in range(pipe.start_iteration, context.iterations):
        torch.manual_seed(iteration)
        x = torch.randn(BATCH, WIDTH)
        loss = pipe.step(x, target=x.roll(1, dims=1))  # every rank returns the loss
        pipe.clip_grad_norm_(1.0)
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
'''
GPT = '''\
"""A byte-level GPT, trained on the sources of Python's standard library.

Its model, data and loop are in pipemorph_trainer/examples/gpt.py.
"""

from pipemorph_trainer import TrainerContext
from pipemorph_trainer.examples.gpt import train

train(TrainerContext.from_env())
'''


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "init",
        help="write a manifest and a training script to begin with",
        description="Write job.yaml and train.py, which run as they are, to DIR. Options that "
        "are not given are asked for on a terminal. Nothing is overwritten.",
    )
    parser.add_argument("dir", metavar="DIR", nargs="?", default=".", help="folder (default: .)")
    for name, least, most, text in (
        ("stages", 1, MAX_STAGES, f"ranks, each with one stage (default: {STAGES})"),
        ("microbatches", 1, MOST_MICROBATCHES,
         f"parts of a batch (default: {MICROBATCHES_PER_STAGE} per stage)"),
        ("iterations", 1, None, f"(default: {ITERATIONS})"),
    ):  # fmt: skip
        parser.add_argument(
            f"--{name}", metavar="N", type=whole_number_type(least, most), help=text
        )
    parser.add_argument(
        "--model", choices=MODELS, help="a model to replace by your own, or a GPT (default: own)"
    )
    parser.add_argument("--name", help="name of the job (default: that of the folder)")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.dir)
    for name in (MANIFEST, SCRIPT):
        if (folder / name).exists():
            raise InputError(f"{display_name(folder / name)} exists; name another folder")
    _ask_for_missing_options(args)
    stages = args.stages or STAGES
    microbatches = args.microbatches or MICROBATCHES_PER_STAGE * stages
    job = JOB.format(
        manifest=MANIFEST, script=SCRIPT, stages=stages, microbatches=microbatches,
        iterations=args.iterations or ITERATIONS,
        # In quotes: YAML reads names such as 7 and yes as other values.
        name=json.dumps(args.name or _make_job_name(folder)),
    )  # fmt: skip
    parse_job(job)
    script = GPT if args.model == "gpt" else _make_own_script(stages, microbatches)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((MANIFEST, job), (SCRIPT, script)):
            with (folder / name).open("x") as file:
                file.write(text)
    except OSError as error:
        raise InputError(
            f"{display_name(error.filename or folder)} cannot be written: {error.strerror}"
        ) from None
    enter = "" if folder == Path() else f"  cd {folder}\n"
    print(
        f"wrote {folder / MANIFEST} and {folder / SCRIPT}. To train:\n{enter}"
        f"  pipemorph run {MANIFEST} --out out\n"
        "or with torchrun:\n"
        f"  pipemorph serve {MANIFEST} --out out-torchrun -- "
        f"torchrun --nproc-per-node {stages} {SCRIPT}"
    )
    return 0


def _make_own_script(stages: int, microbatches: int) -> str:
    size = {"{layers}": max(LAYERS, stages), "{batch}": SAMPLES * microbatches}
    script = OWN
    for name, number in size.items():
        script = script.replace(name, str(number))
    return script


def _ask_for_missing_options(args: argparse.Namespace) -> None:
    """Set the options that were not given by answers, on a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    if args.stages is None:
        args.stages = _ask("stages", STAGES, whole_number_type(1, MAX_STAGES))
    if args.microbatches is None:
        default = MICROBATCHES_PER_STAGE * args.stages
        args.microbatches = _ask("microbatches", default, whole_number_type(1, MOST_MICROBATCHES))
    if args.model is None:
        args.model = _ask(f"model ({' or '.join(MODELS)})", MODELS[0], _parse_model)


def _ask(what: str, default: Any, parse: Callable[[str], Any]) -> Any:
    while True:
        try:
            answer = input(f"{what} [{default}]: ").strip()
        except EOFError:
            raise InputError(f"no answer for {what}") from None
        if not answer:
            return default
        try:
            return parse(answer)
        except argparse.ArgumentTypeError as error:
            print(error)


def _parse_model(text: str) -> str:
    if text not in MODELS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {' nor '.join(MODELS)}")
    return text


def _make_job_name(folder: Path) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower())[:63].strip("-")
    return name or "mine"
