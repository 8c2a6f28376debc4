"""The example with Lightning trains as a plain loop over the whole model does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from soak_packages import require_package

EXAMPLE = Path(__file__).parents[3] / "examples/lightning"
ITERATIONS = 12

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def train_whole_model(example: Any) -> list[float]:
    """Losses of the whole model in this process."""
    model = example.make_stage(SimpleNamespace(is_first=True, is_last=True, layers=range))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, target in example.make_batches(0, ITERATIONS):
        loss = example.loss_fn(model(tokens), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """The commands of its manifest."""
    require_package("lightning")
    spec = spec_from_file_location("lightning_example", EXAMPLE / "train.py")
    assert spec is not None and spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pipemorph.cli", "run", "job.yaml", "--out", "out"],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    printed = (tmp_path / "out/logs/rank-0.log").read_text()
    losses = [float(found) for found in re.findall(r"^iteration \d+: loss (\S+)", printed, re.M)]
    assert losses == pytest.approx(train_whole_model(example), abs=2e-6)
    assert len(losses) == ITERATIONS and losses[-1] < losses[0]
