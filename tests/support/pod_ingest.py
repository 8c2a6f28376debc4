"""``python pod_ingest.py JOB_FILE TOKEN PORT FOLDER``: an ingest for the pods of one job.

Pods prove themselves by ``TOKEN/UID``. The ingest stores what belongs into status in
``FOLDER/recoveries.json``, which the next process goes on from, and appends every reported
iteration to ``FOLDER/iterations.jsonl``. It reads the operator's records of lost pods from
``FOLDER/replacements.jsonl``. In place of decisions on the layout it has ``FOLDER/asks.jsonl``: an
iteration, and the layout that it requests once that is finished; the requested layouts are in
``FOLDER/requested.jsonl``. If there is ``FOLDER/dies-at-a-move``, it is killed when ranks have
departed for another layout and only it knows.
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

from pipemorph.control import JobController
from pipemorph.control.job_generations import JobGenerations
from pipemorph.ingest import (
    BearerAuthenticator,
    Identity,
    IngestServer,
    InMemoryJobStore,
    RestartHandler,
)
from pipemorph.protocol import LinkHealthReport
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.layout import RankLayout
from pipemorph.spec.running_subset import RunningSubset
from pipemorph.spec.status_recoveries import PodReplacement, Recoveries


class PodTokens:
    """Knows the UID of a pod by its token, as a cluster's reviews do."""

    def __init__(self, token: str) -> None:
        self._of_job = BearerAuthenticator(token)

    async def authenticate_caller(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        of_job, _, uid = token.rpartition("/")
        await self._of_job.authenticate_caller(of_job, namespace, job, source)
        return Identity(f"pod {uid}", uid)


class JobFiles:
    """The generations of the job, and its files."""

    def __init__(self, job: PipeMorphJob, folder: Path) -> None:
        self._file, self._iterations = folder / "recoveries.json", folder / "iterations.jsonl"
        self._replacements = folder / "replacements.jsonl"
        self._asks, self._requested = folder / "asks.jsonl", folder / "requested.jsonl"
        self._dies = folder / "dies-at-a-move"
        saved = None
        if self._file.exists():
            saved = Recoveries.model_validate_json(self._file.read_text())
        done = [json.loads(line)[0] + 1 for line in _lines(self._iterations)]
        spec = job.spec
        most = spec.failure_policy.max_restarts
        self.of_job = JobGenerations(
            spec.parallelism.pods,
            most,
            saved=saved,
            done=max(done, default=0),
            cut=spec.parallelism,
            patience=spec.failure_policy.replacement_seconds,
            relayout=spec.adaptation.relayout,
        )

    def lost(self) -> list[PodReplacement]:
        """Records of lost pods that the operator would write."""
        return [PodReplacement.model_validate_json(line) for line in _lines(self._replacements)]

    def find_generations(self, namespace: str, job: str) -> JobGenerations:
        return self.of_job

    async def persist_generations(self, namespace: str, job: str) -> None:
        if self.of_job.layout_before is not None and self._dies.exists():
            self._dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.write()

    @property
    def wanted(self) -> RankLayout:
        """The layout to request next; empty: none now."""
        asks = [json.loads(line) for line in _lines(self._asks)][len(_lines(self._requested)) :]
        if asks and asks[0][0] < len(_lines(self._iterations)):
            return RankLayout.model_validate(asks[0][1])
        return RankLayout()

    def record_request(self, layout: RankLayout) -> None:
        with self._requested.open("a") as file:
            print(layout.model_dump_json(), file=file)

    def write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(
            (self.of_job.status_recoveries or self.of_job.saved).model_dump_json(by_alias=True)
        )
        new.rename(self._file)

    def reported(self, report: LinkHealthReport) -> None:
        with self._iterations.open("a") as file:
            for each in report.iterations:
                print(json.dumps([each.index, each.loss]), file=file)
        if self.of_job.process_rank_report(report, time.time()):
            self.write()


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


async def serve(job: PipeMorphJob, token: str, port: int, folder: Path) -> None:
    files, store = JobFiles(job, folder), InMemoryJobStore()
    key = job.metadata.namespace, job.metadata.name
    controllers = [
        JobController(
            RunningSubset(job.spec.parallelism, files.of_job.excluded_replicas).build_reduced_spec(
                job.spec
            ),
            on_report=files.reported,
        )
    ]
    store.add_job(*key, controllers[0])

    sizes = [files.of_job.excluded_replicas]

    def changed(*_: Any) -> None:
        spec = RunningSubset(
            job.spec.parallelism, files.of_job.excluded_replicas
        ).build_reduced_spec(job.spec)
        if sizes[0] != files.of_job.excluded_replicas:
            sizes[0] = files.of_job.excluded_replicas
            controllers[0] = controllers[0].with_replicas_of(spec)
            store.add_job(*key, controllers[0])
        files.write()

    desk = RestartHandler(files, on_change=changed)
    async with IngestServer(store, PodTokens(token), port=port, restart_handler=desk):
        print("serving", flush=True)
        while True:
            # A watch would bring these.
            before = files.of_job.status_recoveries
            files.of_job.expect_replacements(files.lost(), time.time())
            if files.of_job.status_recoveries != before:
                files.write()
            desk.notify_loss(files.of_job)
            of = files.of_job.attempt, files.of_job.saved.generation
            if (wanted := files.wanted) and await desk.request_layout(*key, wanted, of=of):
                files.record_request(wanted)
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
