"""A job of several pods on this machine, each with its launcher, and its ingest, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch import free_port
from manifests import manifest_of
from prepared_processes import PreparedProcess

from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.status_recoveries import PodReplacement, Recoveries

DEADLINE = 120.0
ITERATIONS = 24
TOKEN = "token of the job"
SUPPORT = Path(__file__).resolve().parent

SCRIPT = """
import time
import torch
from torch import nn
from pipemorph_trainer import Pipeline, TrainerContext

context = TrainerContext.from_env()
args, generation = context.args, context.generation

def read_labels():
    time.sleep(1000)

torch.manual_seed(context.coordinate().stage)
stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
optimizer = torch.optim.Adam(stage.parameters(), 1e-2)
with Pipeline(stage, context=context, optimizer=optimizer, loss_fn=nn.functional.mse_loss) as pipe:
    while pipe.iteration < context.job.spec.trainer.iterations:
        if pipe.iteration == args.get("hang_at") and context.rank == 3 and generation == 0:
            read_labels()
        time.sleep(args["pause"])
        draw = torch.Generator().manual_seed(pipe.iteration + context.coordinate().replica)
        batch = torch.randn(4, 8, generator=draw)
        optimizer.zero_grad()
        pipe.step(batch, target=batch.flip(1))
        optimizer.step()
"""


class Job:
    """A job of two stages in two pods of ``size`` ranks, unless ``spec`` has others."""

    def __init__(
        self,
        folder: Path,
        *,
        restarts: int = 2,
        size: int = 2,
        iterations: int = ITERATIONS,
        order: list[str] | None = None,
        spec: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        script: str = SCRIPT,
        **args: Any,
    ) -> None:
        folder.mkdir()
        self.folder, self.size = folder, size
        self.port, store = free_port(), free_port()
        (folder / "train.py").write_text(script)
        job = {
            "parallelism": {
                "stages": 2,
                "replicas": size,
                "ranksPerPod": size,
                "order": order or ["pp", "dp_replicate"],
            },
            "schedule": {"microbatches": 4},
            "trainer": {
                "command": ["python", str(folder / "train.py")],
                "iterations": iterations,
                "args": ({"pause": 0.1} if script is SCRIPT else {}) | args,
            },
            "transport": {"deadlineSeconds": 30},
            "failurePolicy": {"maxRestarts": restarts},
        } | (spec or {})
        (folder / "job.json").write_text(json.dumps(manifest_of(job, "pods")))
        cut = JobSpec.model_validate(job).parallelism
        (folder / "engine").write_text("5" * 64)
        self._env = {
            **os.environ,
            "LOCAL_WORLD_SIZE": str(cut.ranks_per_pod),
            "WORLD_SIZE": str(cut.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PIPEMORPH_JOB_FILE": str(folder / "job.json"),
            "PIPEMORPH_SECRET_FILE": str(folder / "engine"),
            "PIPEMORPH_INGEST_URL": f"http://127.0.0.1:{self.port}",
            **(env or {}),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lives = 0
        self._uids: dict[int, str] = {}
        """UID of each pod."""
        self.ingest = self.start_ingest()
        self.pods = {index: self.start_pod(index) for index in range(cut.pods)}

    def _start(self, name: str, *command: str, **env: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = PreparedProcess(
                [sys.executable, *command], env=self._env | env, stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def start_ingest(self) -> subprocess.Popen[bytes]:
        job = str(self.folder / "job.json")
        args = [job, TOKEN, str(self.port), str(self.folder)]
        before = self.log("ingest").count("serving")
        found = self._start("ingest", str(SUPPORT / "pod_ingest.py"), *args)
        self.wait("the ingest serves", lambda: self.log("ingest").count("serving") > before)
        return found

    def start_pod(self, index: int) -> subprocess.Popen[bytes]:
        memory = self.folder / f"kept-{index}-{self._lives}"
        memory.mkdir()
        uid = self._uids[index] = f"life-{self._lives}"
        self._lives += 1
        token = self.folder / f"token-{uid}"
        token.write_text(f"{TOKEN}/{uid}")
        module = ["-m", "pipemorph_trainer.launcher", "--generations", "--grace=10", "--"]
        return self._start(
            f"pod-{index}",
            *module,
            *(sys.executable, "-u", str(self.folder / "train.py")),
            PIPEMORPH_POD_INDEX=str(index),
            PIPEMORPH_KEPT_DIR=str(memory),
            PIPEMORPH_TOKEN_FILE=str(token),
        )

    def lose(self, index: int) -> None:
        """Kill a launcher, and with it its ranks; a new one in its place has nothing in memory."""
        self.kill(index)
        self.pods[index] = self.start_pod(index)

    def kill(self, index: int, *, replaced: bool = False) -> float:
        """Kill a launcher, and with it its ranks. ``replaced``: the operator records the loss, as
        it does within a second. Returns the time."""
        self.pods[index].kill()
        at = time.time()
        self.pods[index].wait(DEADLINE)
        if replaced:
            when = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
            record = PodReplacement(
                attempt=0,
                pod=index,
                uid=self._uids[index],
                at=when,
                cause=f"pod {index} was killed",
            )
            with (self.folder / "replacements.jsonl").open("a") as file:
                print(record.model_dump_json(by_alias=True), file=file)
        return at

    def ask(self, layout: Sequence[int] | dict[str, Any], *, after: int = 0) -> None:
        """Have the ranks leave for another layout, after ``after`` more iterations."""
        requested = layout if isinstance(layout, dict) else {"layers": list(layout)}
        with (self.folder / "asks.jsonl").open("a") as file:
            print(json.dumps([len(self.iterations()) + after, requested]), file=file)

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def iterations(self) -> dict[int, float]:
        """The loss of every reported iteration."""
        file = self.folder / "iterations.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return dict(json.loads(line) for line in lines)

    def recoveries(self) -> Recoveries:
        file = self.folder / "recoveries.json"
        return Recoveries.model_validate_json(file.read_text() if file.exists() else "{}")

    def recovered(self, count: int) -> bool:
        """True if the ranks have recovered from ``count`` losses, the last one included."""
        losses = self.recoveries().last
        return len(losses) == count and losses[-1].seconds is not None

    def rank(self, number: int) -> int:
        """The process id of a rank. Of its pod's launcher it is a child."""
        launcher = self.pods[number // self.size].pid
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if int(parent) == launcher and name == f"rank-{number}":
                return int(entry.name)
        raise AssertionError(f"rank {number} does not run:\n{self}")

    def wait(self, what: str, found: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not found():
            assert time.monotonic() < end, f"not within {DEADLINE:g} s: {what}\n{self}"
            time.sleep(0.02)

    def wait_for_iterations(self, count: int) -> None:
        self.wait(f"{count} iterations", lambda: len(self.iterations()) >= count)

    def ends(self) -> list[int]:
        """The exit codes of all pods."""
        try:
            return [self.pods[index].wait(DEADLINE) for index in sorted(self.pods)]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the pods have not ended:\n{self}") from None

    def __str__(self) -> str:
        names = (*(f"pod-{index}" for index in sorted(self.pods)), "ingest")
        return "\n".join(f"--- {name}\n{self.log(name)[-4000:]}" for name in names)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(DEADLINE)
