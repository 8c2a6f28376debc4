"""A job as ``pipemorph serve`` hosts it, and certificates for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import prepared_processes
from certificates import self_signed
from launch import free_port
from manifests import manifest_of
from prepared_processes import PreparedProcess

from pipemorph.spec.job_spec import PipeMorphJob

OP = {"forward": 10, "backwardInput": 10, "backwardWeight": 10}
DEADLINE = 60.0


def manifest(stages: int = 2, iterations: int = 12, **spec: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "parallelism": {"stages": stages},
        "schedule": {"microbatches": 8, "stageTimes": [OP] * stages},
        "emulation": {"stageTimes": [OP], "messageBytes": 4096},
        "trainer": {"module": "train", "iterations": iterations, "args": {"width": 3}},
    }
    return manifest_of(base | spec, "served", namespace="lab")


def job(**spec: Any) -> PipeMorphJob:
    return PipeMorphJob.model_validate(manifest(**spec))


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    return self_signed(folder, "127.0.0.1", name="served")


def torchrun(
    folder: Path, script: str, environment: dict[str, str], *options: str
) -> tuple[int, str]:
    """Run two ranks of a script; returns their exit status and output."""
    file = folder / "train.py"
    file.write_text(script)
    done = prepared_processes.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
            "--local-addr", "127.0.0.1", *options, str(file),
        ],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


class Served:
    """``pipemorph serve`` as a process, at any port of 127.0.0.1."""

    def __init__(self, folder: Path, content: dict[str, Any], *options: str) -> None:
        self.folder = folder
        (folder / "job.json").write_text(json.dumps(content))
        self._log = folder / "serve.log"
        with self._log.open("w") as log:
            self.process = PreparedProcess(
                [
                    sys.executable, "-m", "pipemorph.cli", "serve", str(folder / "job.json"),
                    "--listen", "127.0.0.1:0", "--token-file", str(folder / "token"), *options,
                ],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._log.read_text()

    def environment(self) -> dict[str, str]:
        """Environment that the output gives for every rank."""
        self.says("PIPEMORPH_SECRET_FILE=")
        lines = [line for line in self.output.splitlines() if line.startswith("  export ")]
        pairs = (line.removeprefix("  export ").partition("=") for line in lines)
        return {name: value for name, _, value in pairs}

    def says(self, text: str) -> None:
        """Wait until it has printed ``text``."""
        until = time.monotonic() + DEADLINE
        while text not in self.output:
            running = self.process.poll() is None
            assert running and time.monotonic() < until, f"no {text!r} in:\n{self.output}"
            time.sleep(0.02)

    def ended(self) -> int:
        """Exit status, once it has ended."""
        return self.process.wait(DEADLINE)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
