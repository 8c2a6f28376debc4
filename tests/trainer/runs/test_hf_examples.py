"""The example with a model of Hugging Face trains as transformers does in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import free_port
from soak_packages import require_package
from torch.nn import functional

from pipemorph_trainer.examples import hf_llama as example

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[3] / "examples"


def one_process(replicas: int) -> list[float]:
    """Losses of the steps and of the evaluations of the whole model, in order."""
    torch.set_num_threads(1)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sources = [example.generate_batches(replica) for replica in range(replicas)]
    losses = []

    def mean_loss(tokens: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=example.PADDING
        )

    for iteration in range(example.ITERATIONS):
        parts = zip(*(next(source) for source in sources), strict=True)
        batch = [torch.cat(part) for part in parts]
        loss = mean_loss(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if iteration % example.EVALUATE_EVERY == example.EVALUATE_EVERY - 1:
            with torch.no_grad():
                losses.append(mean_loss(*batch).item())
    return losses


def under_torchrun() -> list[float]:
    """The losses that two ranks of the example print, in order."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
            "--master-addr=127.0.0.1", f"--master-port={free_port()}",
            "-m", "pipemorph_trainer.examples.hf_llama",
        ],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


def under_a_manifest(out: Path) -> list[float]:
    """The losses of ``pipemorph run`` of its manifest."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pipemorph.cli", "run", str(EXAMPLES / "hf-llama.yaml"),
            "--out", str(out),
        ],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((out / "report.json").read_text())
    return [iteration["loss"] for iteration in report["iterations"]]


def test_a_llama_trains_and_evaluates_as_in_one_process(tmp_path: Path) -> None:
    require_package("transformers")
    losses, expected = under_torchrun(), one_process(1)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    steps = [loss for number, loss in enumerate(expected, 1) if number % 6]
    assert under_a_manifest(tmp_path / "out") == pytest.approx(steps, rel=1e-5)
