"""``python pod_ingest.py JOB_FILE TOKEN PORT FOLDER``: an ingest for the pods of one job.

Pods prove themselves by ``TOKEN/UID``. It keeps what belongs into status in
``FOLDER/recoveries.json``, which the next process goes on from, and appends every reported
iteration to ``FOLDER/iterations.jsonl``. What the operator would write of lost pods it reads from
``FOLDER/replacements.jsonl``. In place of decisions on the layout it has ``FOLDER/asks.jsonl``:
an iteration, and the layout that it asks for once that is finished; what ranks are asked to leave
for is in ``FOLDER/asked.jsonl``. If there is ``FOLDER/dies-at-a-move``, it is killed
when ranks have left for another layout and nobody knows it but it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pipemorph.api.layout import RankLayout
from pipemorph.api.running import Running
from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status_recoveries import PodReplacement, Recoveries
from pipemorph.control import JobController
from pipemorph.control.generations import Generations
from pipemorph.ingest import (
    BearerAuthenticator,
    GenerationDesk,
    Identity,
    IngestServer,
    MemoryStore,
)
from pipemorph.wire import LinkHealthReport


class PodTokens:
    """Knows the UID of a pod by its token, as a cluster's reviews do."""

    def __init__(self, token: str) -> None:
        self._of_job = BearerAuthenticator(token)

    async def authenticate(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        of_job, _, uid = token.rpartition("/")
        await self._of_job.authenticate(of_job, namespace, job, source)
        return Identity(f"pod {uid}", uid)


class Kept:
    """The generations of the job, and its files."""

    def __init__(self, job: PipeMorphJob, folder: Path) -> None:
        self._file, self._iterations = folder / "recoveries.json", folder / "iterations.jsonl"
        self._replacements = folder / "replacements.jsonl"
        self._asks, self._asked = folder / "asks.jsonl", folder / "asked.jsonl"
        self._dies = folder / "dies-at-a-move"
        saved = None
        if self._file.exists():
            saved = Recoveries.model_validate_json(self._file.read_text())
        done = [json.loads(line)[0] + 1 for line in _lines(self._iterations)]
        spec = job.spec
        most = spec.failure_policy.max_restarts
        self.of_job = Generations(
            spec.parallelism.pods,
            most,
            saved=saved,
            done=max(done, default=0),
            cut=spec.parallelism,
            patience=spec.failure_policy.replacement_seconds,
            relayout=spec.adaptation.relayout,
        )

    def lost(self) -> list[PodReplacement]:
        """What the operator has written of lost pods."""
        return [PodReplacement.model_validate_json(line) for line in _lines(self._replacements)]

    def generations(self, namespace: str, job: str) -> Generations:
        return self.of_job

    async def persist_generations(self, namespace: str, job: str) -> None:
        if self.of_job.layout_before is not None and self._dies.exists():
            self._dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.write()

    @property
    def wanted(self) -> RankLayout:
        """The layout to ask for next; empty: none now."""
        asks = [json.loads(line) for line in _lines(self._asks)][len(_lines(self._asked)) :]
        if asks and asks[0][0] < len(_lines(self._iterations)):
            return RankLayout.model_validate(asks[0][1])
        return RankLayout()

    def asked(self, layout: RankLayout) -> None:
        with self._asked.open("a") as file:
            print(layout.model_dump_json(), file=file)

    def write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text((self.of_job.told or self.of_job.saved).model_dump_json(by_alias=True))
        new.rename(self._file)

    def reported(self, report: LinkHealthReport) -> None:
        with self._iterations.open("a") as file:
            for each in report.iterations:
                print(json.dumps([each.index, each.loss]), file=file)
        if self.of_job.reported(report, time.time()):
            self.write()


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


async def serve(job: PipeMorphJob, token: str, port: int, folder: Path) -> None:
    kept, store = Kept(job, folder), MemoryStore()
    key = job.metadata.namespace, job.metadata.name
    controllers = [
        JobController(
            Running(job.spec.parallelism, kept.of_job.left_out).spec(job.spec),
            on_report=kept.reported,
        )
    ]
    store.add(*key, controllers[0])

    sizes = [kept.of_job.left_out]

    def changed(*_: Any) -> None:
        spec = Running(job.spec.parallelism, kept.of_job.left_out).spec(job.spec)
        if sizes[0] != kept.of_job.left_out:
            sizes[0] = kept.of_job.left_out
            controllers[0] = controllers[0].resized(spec)
            store.add(*key, controllers[0])
        kept.write()

    desk = GenerationDesk(kept, on_change=changed)
    async with IngestServer(store, PodTokens(token), port=port, desk=desk):
        print("serving", flush=True)
        while True:
            # As a watch brings it.
            before = kept.of_job.told
            kept.of_job.expect(kept.lost(), time.time())
            if kept.of_job.told != before:
                kept.write()
            desk.hurry(kept.of_job)
            of = kept.of_job.attempt, kept.of_job.saved.generation
            if (wanted := kept.wanted) and await desk.ask(*key, wanted, of=of):
                kept.asked(wanted)
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(
        serve(
            PipeMorphJob.model_validate_json(Path(sys.argv[1]).read_text()),
            sys.argv[2],
            int(sys.argv[3]),
            Path(sys.argv[4]),
        )
    )
