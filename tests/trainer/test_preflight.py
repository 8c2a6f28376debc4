"""The preflight: its findings, and that it becomes the training program."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pipemorph_trainer import preflight


def test_a_fit_pod_becomes_its_command() -> None:
    command = [sys.executable, "-m", "pipemorph_trainer.preflight", f"--shm={1 << 20}", "--"]
    done = subprocess.run(
        [*command, "echo", "-x", "--rdma"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "-x --rdma\n"


def test_what_is_missing_is_named_and_ends_in_78(tmp_path: Path) -> None:
    found = preflight.find_faults(rdma=True, memlock=False, shm_bytes=1 << 60, devices=tmp_path)
    assert "uverbs" in found[0]
    assert str(1 << 60) in found[1]
    command = [
        sys.executable,
        "-m",
        "pipemorph_trainer.preflight",
        f"--shm={1000 << 40}",
        "--",
        "true",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == preflight.EXIT_UNFIT
    assert "/dev/shm" in done.stderr


def test_devices_are_seen(tmp_path: Path) -> None:
    (tmp_path / "uverbs0").touch()
    assert preflight.find_faults(rdma=True, memlock=False, shm_bytes=None, devices=tmp_path) == []


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_may_lock", lambda: False)

    def limited(limit: int) -> list[str]:
        return preflight.find_faults(
            rdma=False, memlock=True, shm_bytes=None, locked_limit=lambda: limit
        )

    assert limited(resource.RLIM_INFINITY) == []
    assert limited(preflight.LEAST_LOCKED_BYTES) == []
    assert "65536" in limited(65536)[0]
