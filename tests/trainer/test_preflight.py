"""The preflight: what it finds, and that it becomes the training program."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from pipemorph.fabric.check.measure import Checked
from pipemorph.fabric.check.pods import NoCheck, Place
from pipemorph.fabric.check.verdict import Finding, Port
from pipemorph.wire import FabricView
from pipemorph_trainer import preflight


def test_a_fit_pod_becomes_its_command() -> None:
    command = [sys.executable, "-m", "pipemorph_trainer.preflight", f"--shm={1 << 20}", "--"]
    done = subprocess.run(
        [*command, "echo", "-x", "--rdma"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "-x --rdma\n"


def test_what_is_missing_is_named_and_ends_in_78(tmp_path: Path) -> None:
    found = preflight.faults(
        rdma=True,
        memlock=False,
        shm_bytes=1 << 60,
        devices=tmp_path,
    )
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
    assert preflight.faults(rdma=True, memlock=False, shm_bytes=None, devices=tmp_path) == []


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_may_lock", lambda: False)

    def limited(limit: int) -> list[str]:
        return preflight.faults(
            rdma=False, memlock=True, shm_bytes=None, locked_limit=lambda: limit
        )

    assert limited(resource.RLIM_INFINITY) == []
    assert limited(preflight.LEAST_LOCKED_BYTES) == []
    assert "65536" in limited(65536)[0]


def in_pod(tmp_path: Path, index: int = 0, **changes: str) -> dict[str, str]:
    """The variables of a pod of two, each with four ranks."""
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    env = {
        "PIPEMORPH_POD_INDEX": f"{index}",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "PIPEMORPH_SECRET_FILE": f"{tmp_path / 'secret'}",
    }
    return env | changes


class Checking:
    """In place of the check, which needs verbs."""

    def __init__(self, result: Checked | NoCheck | None) -> None:
        self.result = result
        self.place: Place | None = None

    def __call__(self, place: Place, **_: object) -> Checked | None:
        self.place = place
        if isinstance(self.result, NoCheck):
            raise self.result
        return self.result


Case = tuple[Checked | None, str, tuple[str, ...] | None, list[str]]
"""The check's result, and what is asked for; what status gets, and the faults."""
SICK = Checked({"pod 0": []}, [], [Finding("down", Port("pod 0", "x/1"), None, "is DOWN")])


@pytest.mark.parametrize(
    "case",
    [
        (None, "require", None, []),
        (SICK, "report", ("pod 0 x/1: is DOWN",), []),
        (SICK, "require", ("pod 0 x/1: is DOWN",), ["pod 0 x/1: is DOWN"]),
        (replace(SICK, findings=[]), "require", (), []),
    ],
)
def test_what_the_check_of_rdma_ports_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    result, mode, seen, found = case
    checking = Checking(result)
    monkeypatch.setattr(preflight, "check_pods", checking)
    view, faults = preflight.check_fabric(in_pod(tmp_path, index=1), mode)
    assert checking.place == Place(1, 2, "127.0.0.1", "0123456789abcdef")
    assert (view and view.sick, faults) == (seen, found)


def test_a_check_that_cannot_be_made_is_told_and_fails_only_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "check_pods", Checking(NoCheck("no Python here has pyverbs")))
    text = "the check of the RDMA ports was not made: no Python here has pyverbs"
    for mode, faults in (("report", []), ("require", [text])):
        view, found = preflight.check_fabric(in_pod(tmp_path), mode)
        assert view is not None
        assert (view.message, found) == (text, faults)
    for name in ("MASTER_ADDR", "PIPEMORPH_SECRET_FILE", "WORLD_SIZE"):
        _, (line,) = preflight.check_fabric(in_pod(tmp_path, **{name: ""}), "require")
        assert line.endswith(f"{name} is not set; the operator sets it")
    _, (line,) = preflight.check_fabric(in_pod(tmp_path, WORLD_SIZE="x"), "require")
    assert "expected numbers" in line


def test_the_result_reaches_the_command_in_its_environment(tmp_path: Path) -> None:
    """On this host, whatever it has of RDMA."""
    show = "import os; print(os.environ['PIPEMORPH_FABRIC'])"
    command = [sys.executable, "-m", "pipemorph_trainer.preflight", "--fabric=report", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", show],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | in_pod(tmp_path, LOCAL_WORLD_SIZE="8"),
    )
    view = TypeAdapter(FabricView).validate_json(done.stdout)
    assert view.message or view.pods == 1
