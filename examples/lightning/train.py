"""Lightning trains a small GPT-like model with PipeMorph's pipeline.

Lightning's `Trainer` has the loop, callbacks and loggers; the pipeline does forward, backward and
the messages between stages, so `training_step` calls its `step` under manual optimization. Each
rank has a `Trainer` of one device: a strategy of several, such as DDP or FSDP, would wrap the
module and move gradients itself.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipemorph_trainer import ModelShard, Pipeline, TrainerContext
from pipemorph_trainer.devices import choose_device

LAYERS, WIDTH, TOKENS, LENGTH, BATCH = 4, 64, 128, 32, 16


def make_stage(part: ModelShard) -> nn.Module:
    torch.manual_seed(0)  # Every rank makes the whole model, and takes its part.
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(LAYERS)
    ]
    embed, head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
    own = [layers[layer] for layer in part.layers(LAYERS)]
    return nn.Sequential(*[embed][: part.is_first], *own, *[head][: part.is_last])


def loss_fn(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class PipelineModule(lightning.LightningModule):
    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self.pipe = pipe
        self.stage = pipe.module  # For Lightning's summary.
        self.automatic_optimization = False

    def training_step(self, batch, index):
        tokens, target = batch
        loss = self.pipe.step(tokens, target=target)  # The same on every rank.
        self.pipe.clip_grad_norm_(1.0)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss, prog_bar=True)
        if self.pipe.coordinate.stage == 0:
            print(f"iteration {index}: loss {loss:.6f}", flush=True)

    def configure_optimizers(self):
        return self.pipe.optimizer


def make_batches(replica: int, iterations: int) -> DataLoader:
    """Batches for all stages of a replica alike, so no sampler divides them over ranks."""
    generator = torch.Generator().manual_seed(replica)
    tokens = torch.randint(0, TOKENS, (iterations * BATCH, LENGTH), generator=generator)
    return DataLoader(TensorDataset(tokens, (tokens * 7 + 3) % TOKENS), batch_size=BATCH)


if __name__ == "__main__":
    context = TrainerContext.from_env()
    device = choose_device(context.local_rank)
    with Pipeline(
        lambda part: make_stage(part).to(device),
        optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
        context=context,
        loss_fn=loss_fn,
    ) as pipe:
        trainer = lightning.Trainer(
            accelerator=device.type,
            devices=1 if device.type == "cpu" else [device.index],
            strategy="auto",
            max_epochs=1,
            enable_checkpointing=False,  # PipeMorph saves all ranks together: spec.checkpoint.
            enable_progress_bar=False,
            logger=False,
        )
        batches = make_batches(pipe.coordinate.replica, context.iterations - pipe.start_iteration)
        trainer.fit(PipelineModule(pipe), batches)
