"""A GPT-2 of Hugging Face's transformers, from its config, with tied embeddings.

The shortest script with a model of transformers; ``hf_llama.py`` also has padding and an
evaluation. Copy it and change the model, the data and the loop. It needs ``transformers`` and runs
under torchrun, under ``pipemorph run`` and on a cluster (``examples/kubernetes/hf-gpt2.yaml``)::

    torchrun --nproc-per-node=2 -m pipemorph_trainer.examples.hf_gpt2
    pipemorph run examples/hf-gpt2.yaml --out out/hf-gpt2
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipemorph.errors import InputError
from pipemorph_trainer import Part, Pipeline, TrainerContext
from pipemorph_trainer.devices import own_device

MICROBATCHES, ITERATIONS, BATCH, LENGTH = 4, 10, 8, 16
VOCABULARY = 128
# Without dropout, so that the losses are those of one process.
SIZES = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip


class GPT2Stage(nn.Module):
    """Some blocks of a ``GPT2LMHeadModel``; both embeddings on the first stage, the norm and the
    head on the last. Hidden states pass from stage to stage."""

    def __init__(self, full: Any, part: Part) -> None:
        super().__init__()
        model = full.transformer
        self.config = full.config
        self.make_mask = import_module("transformers.masking_utils").create_causal_mask
        self.wte: Any = model.wte if part.is_first else None
        self.wpe: Any = model.wpe if part.is_first else None
        # Named by their place in the whole model, so that checkpoints fit other numbers of stages.
        self.h = nn.ModuleDict({str(i): model.h[i] for i in part.layers(full.config.n_layer)})
        self.drop: Any = model.drop if part.is_first else None
        self.ln_f: Any = model.ln_f if part.is_last else None
        self.head: Any = full.lm_head if part.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        if self.wte is not None:
            x = self.drop(self.wte(x) + self.wpe(positions))
        mask = self.make_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None,
            position_ids=positions,
        )  # fmt: skip
        for block in self.h.values():
            x = block(x, None, mask, position_ids=positions)
        return x if self.head is None else self.head(self.ln_f(x))


def make_model() -> Any:
    """The whole model. A large one is built on the meta device, and only its part is loaded."""
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"this example needs Hugging Face's library: pip install transformers ({error})"
        ) from None
    torch.manual_seed(0)
    return library.GPT2LMHeadModel(library.GPT2Config(**SIZES))


def batches(part: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the next tokens, int64 (batch, length), of one part of the data."""
    generator = torch.Generator().manual_seed(part)
    while True:
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(context: TrainerContext) -> None:
    device = own_device(context.local_rank)
    iterations = context.job.spec.trainer.iterations if context.job is not None else ITERATIONS

    with Pipeline(
        lambda part: GPT2Stage(make_model(), part).to(device),
        optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
        context=context,
        loss_fn=loss_fn,
        microbatches=MICROBATCHES if context.job is None else None,
        tied=[("wte.weight", 0), ("head.weight", -1)],
    ) as pipe:
        data = batches(pipe.coordinate.dp_rank)
        for _ in range(pipe.start_iteration):
            next(data)  # A run that resumes goes on with the data behind the checkpoint.
        for iteration in range(pipe.start_iteration, iterations):
            tokens, target = (tensor.to(device) for tensor in next(data))
            loss = pipe.step(tokens, target=target)
            pipe.clip_grad_norm_(1.0)
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
            if context.rank == 0:
                print(f"iteration {iteration}: loss {loss:.6f}", flush=True)


def main() -> int:
    try:
        train(TrainerContext.from_env())
    except InputError as error:
        print(f"hf_gpt2: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
