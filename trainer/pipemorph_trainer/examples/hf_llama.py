"""Llama of Hugging Face's transformers, built from a config, with tied embeddings.

Copy this script and change the model, the data and the loop. It needs ``transformers`` and runs
under torchrun and under ``pipemorph run``::

    torchrun --nproc-per-node=2 -m pipemorph_trainer.examples.hf_llama
    pipemorph run examples/hf-llama.yaml --out out/hf-llama
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
from pipemorph_trainer import ModelShard, Pipeline, TrainerContext
from pipemorph_trainer.devices import choose_device

MICROBATCHES, ITERATIONS, EVALUATE_EVERY = 4, 10, 5
BATCH, LENGTH, PADDING = 8, 16, -100
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
TIED = [("embed.weight", 0), ("head.weight", -1)]


class LlamaStage(nn.Module):
    """Layers of a ``LlamaForCausalLM``, with the embedding on the first stage, norm and head on the
    last. Only hidden states pass from stage to stage: each stage computes the mask and the rotary
    tables from its ``attention_mask``, which is a keyword argument on every rank.
    """

    def __init__(self, full: Any, part: ModelShard) -> None:
        super().__init__()
        model = full.model
        self.config, self.rotary = full.config, model.rotary_emb
        self.make_mask = import_module("transformers.masking_utils").create_causal_mask
        self.embed: Any = model.embed_tokens if part.is_first else None
        # Named by global layer numbers, so that checkpoints fit other numbers of stages.
        share = part.layers(full.config.num_hidden_layers)
        self.layers = nn.ModuleDict({str(layer): model.layers[layer] for layer in share})
        self.norm: Any = model.norm if part.is_last else None
        self.head: Any = full.lm_head if part.is_last else None

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        mask = self.make_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask,
            past_key_values=None, position_ids=positions,
        )  # fmt: skip
        tables = self.rotary(x, position_ids=positions)
        for layer in self.layers.values():
            x = layer(x, attention_mask=mask, position_embeddings=tables, position_ids=positions)
        if self.norm is not None:
            x = self.head(self.norm(x))
        return x


def make_model() -> Any:
    """Make the whole model. (Build a large model on the meta device, and load only its part.)"""
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"this example needs Hugging Face's library: pip install transformers ({error})"
        ) from None
    torch.manual_seed(0)
    return library.LlamaForCausalLM(library.LlamaConfig(**SIZES))


def generate_batches(replica: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tokens, the mask (0 for padding), and the next tokens: each int64 (batch, length)."""
    generator = torch.Generator().manual_seed(replica)
    while True:
        tokens = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH + 1), generator=generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        yield tokens[:, :-1], mask, tokens[:, 1:].masked_fill(mask == 0, PADDING)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Sum of cross-entropies over tokens except padding; ``weight`` makes it a mean."""
    return functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum"
    )


def train(context: TrainerContext) -> None:
    device = choose_device(context.local_rank)
    iterations = context.job.spec.trainer.iterations if context.job is not None else ITERATIONS

    with Pipeline(
        lambda part: LlamaStage(make_model(), part).to(device),
        optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
        context=context,
        loss_fn=loss_fn,
        microbatches=MICROBATCHES if context.job is None else None,
        tied=TIED,
    ) as pipe:
        data = generate_batches(pipe.coordinate.replica)
        for iteration in range(pipe.start_iteration, iterations):
            tokens, mask, target = (tensor.to(device) for tensor in next(data))
            loss = pipe.step(tokens, target=target, weight=mask, attention_mask=mask)
            pipe.clip_grad_norm_(1.0)
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
            if context.rank == 0:
                print(f"iteration {iteration}: loss {loss:.6f}", flush=True)
            if iteration % EVALUATE_EVERY == EVALUATE_EVERY - 1:
                pipe.module.eval()
                loss = pipe.evaluate(tokens, target=target, weight=mask, attention_mask=mask)
                pipe.module.train()
                if context.rank == 0:
                    print(f"evaluation: loss {loss:.6f}", flush=True)


def main() -> int:
    try:
        train(TrainerContext.from_env())
    except InputError as error:
        print(f"hf_llama: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
