"""Ranks of torchrun under ``pipemorph serve``: they get their job, report, and adapt."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, certificate, job, manifest, torchrun

from pipemorph.errors import InputError
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.served.serve import JoinTracker
from pipemorph.local.served.served_run import ServeOptions, make_tls_context
from pipemorph.local.service import ControlService
from pipemorph_trainer.context import TrainerContext, request_job

SCRIPT = """
import os
import torch.distributed as dist
from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext

dist.init_process_group("gloo")
context = TrainerContext.from_env()
assert context.args == {"width": 3}, context.args
stage = EmulatedStage.from_spec(context.job.spec, stage=context.rank)
with Pipeline(stage, context=context) as pipe:
    for iteration in range(context.job.spec.trainer.iterations):
        if os.environ.get("FAIL_ONCE") and (context.attempt, context.rank, iteration) == (0, 1, 2):
            raise RuntimeError("rank 1 fails in its first attempt")
        pipe.step()
dist.destroy_process_group()
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(content: dict[str, Any], *options: str) -> Served:
            host = Served(tmp_path, content, *options)
            stack.callback(host.stop)
            return host

        yield start


@pytest.mark.full
def test_ranks_that_torchrun_starts_again_are_another_attempt(served: Any, tmp_path: Path) -> None:
    host = served(
        manifest(iterations=5, failurePolicy={"maxRestarts": 1}), "--out", str(tmp_path / "out")
    )
    # Without the second, torch's own groups find addresses of the first attempt.
    again = {"FAIL_ONCE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = host.environment() | again
    status, output = torchrun(tmp_path, SCRIPT, environment, "--max-restarts", "1")
    assert status == 0, output
    assert host.ended() == 0, host.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [each["end"] for each in report["attempts"]] == ["failed", "completed"]
    assert "waiting for the ranks to start again: 1 of at most 1" in host.output
    assert len(report["iterations"]) == 5


# --- ranks that may not join ------------------------------------------------------------------


class Host:
    """The service of ``pipemorph serve``, in this process."""

    def __init__(self, *, tls: tuple[Path, Path] | None = None) -> None:
        self.roll = JoinTracker(job(stages=2), RunJournal())
        options = ServeOptions("", Path(), Path(), *(tls or ()))
        self.service = ControlService(
            job(stages=2), self.roll.journal, token="right",
            tls=make_tls_context(options, "127.0.0.1"), join=self.roll.handle_join,
        )  # fmt: skip
        self.roll.service = self.service

    def __enter__(self) -> ControlService:
        return self.service.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.service.__exit__(*error)


def ask(url: str, folder: Path, *, token: str = "right", authority: Path | None = None) -> str:
    file = folder / "token"
    file.write_text(f"{token}\n")
    where = None if authority is None else str(authority)
    return request_job(url, file, where, rank=0, world_size=2, attempt=0, patience=0.0)


def refused(url: str, folder: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        ask(url, folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_rank_with_another_token_is_refused(tmp_path: Path) -> None:
    with Host() as service:
        assert json.loads(ask(service.url, tmp_path))["metadata"]["name"] == "served"
        error = refused(service.url, tmp_path, token="wrong")
        assert "refuses this rank: the bearer token is not this" in error
        assert "PIPEMORPH_TOKEN_FILE must be the --token-file of pipemorph serve" in error


def test_a_certificate_is_checked(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with Host(tls=(cert, key)) as service:
        assert json.loads(ask(service.url, tmp_path, authority=cert))
        error = refused(service.url, tmp_path)
        assert "is not trusted" in error and "set PIPEMORPH_CA_FILE to the authority of" in error
        plain = service.url.replace("https", "http")
        assert "no ingest answers at" in refused(plain, tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        error = refused(url, tmp_path)
        assert f"no ingest answers at {url}" in error and "start pipemorph serve there" in error
    assert "expected http(s)://HOST:PORT" in refused("nowhere:7", tmp_path)
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    with pytest.raises(InputError, match="PIPEMORPH_TOKEN_FILE is not set"):
        TrainerContext.from_env({**rank, "PIPEMORPH_INGEST_URL": url})
    with pytest.raises(InputError, match="none: cannot be read: No such file"):
        request_job(url, tmp_path / "none", None, rank=0, world_size=2, attempt=0, patience=0.0)


def test_a_rank_waits_for_the_token_of_a_host_that_starts(tmp_path: Path) -> None:
    """The token's file is made first and written then."""
    file, found = tmp_path / "token", list[str]()
    with Host() as service:
        rank = threading.Thread(
            target=lambda: found.append(
                request_job(service.url, file, None, rank=0, world_size=2, attempt=0)
            )
        )
        rank.start()
        file.touch()
        rank.join(0.5)
        assert rank.is_alive(), "an empty token is none"
        file.write_text("right\n")
        rank.join(60)
    assert json.loads(found[0])["metadata"]["name"] == "served"


def test_a_context_has_what_the_job_says(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right")
    with Host() as service:
        context = TrainerContext.from_env(
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "MASTER_PORT": "1",
                "TORCHELASTIC_RESTART_COUNT": "2",
                "PIPEMORPH_INGEST_URL": service.url,
                "PIPEMORPH_TOKEN_FILE": str(tmp_path / "token"),
            }
        )
    assert context.job is not None and context.job.metadata.name == "served"
    assert (context.namespace, context.attempt, context.args) == ("lab", 2, {"width": 3})
