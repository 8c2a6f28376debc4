"""Folders of killed processes are swept, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipemorph.errors import InputError
from pipemorph.local.processes import locked_folder
from pipemorph.local.processes.locked_folder import TemporaryFolder, remove_abandoned
from pipemorph.local.results.result_folder import LOCK, ResultFolder


def killed(folder: TemporaryFolder) -> Path:
    """Close the files as the kernel does when a process is killed."""
    (folder.root / "secret").write_text("x")
    os.close(folder._descriptor)
    return folder.root


def test_a_start_removes_only_leftovers_of_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = TemporaryFolder("run", tmp_path)
    (living.root / "secret").touch()
    other_kind = killed(TemporaryFolder("kept", tmp_path))
    name = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: f"{name}2")
    elsewhere = killed(TemporaryFolder("run", tmp_path))
    monkeypatch.undo()
    stale = killed(TemporaryFolder("run", tmp_path))
    prefix = stale.name[: -len("12345678")]
    (tmp_path / f"{prefix}link").symlink_to(other_kind)
    (tmp_path / f"{prefix}file").touch()
    (tmp_path / f"{prefix}open").mkdir(mode=0o755)
    here = set(tmp_path.iterdir()) - {stale}
    mine = TemporaryFolder("run", tmp_path)
    assert set(tmp_path.iterdir()) == here | {mine.root}
    assert (other_kind / "secret").exists() and (elsewhere / "secret").exists()
    assert mine.root.stat().st_mode & 0o777 == 0o700
    assert mine.remove() and living.remove() and mine.remove()
    remove_abandoned("gone", tmp_path / "gone")


def test_a_folder_whose_process_was_killed_by_the_kernel_is_swept(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from pipemorph.local.processes.locked_folder "
        "import *;"
        "print(TemporaryFolder('run', Path(sys.argv[1])).root, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert Path(done.stdout.strip()).exists() and done.returncode == -9
    remove_abandoned("run", tmp_path)
    assert not list(tmp_path.iterdir())


def test_folders_that_are_made_at_once_are_all_there(tmp_path: Path) -> None:
    """Other runs sweep between making a folder and locking it."""
    made: list[TemporaryFolder] = []

    def make() -> None:
        made.extend(TemporaryFolder("run", tmp_path) for _ in range(20))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.root for each in made} == set(tmp_path.iterdir()) and len(made) == 80
    assert all(each.remove() for each in made)


def test_where_there_are_no_locks_nothing_is_swept_and_nothing_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locked_folder.fcntl, "flock", no_locks)
    first, second = TemporaryFolder("run", tmp_path), TemporaryFolder("run", tmp_path)
    assert first.root.exists() and second.remove() and first.remove()
    with ResultFolder.claim_folder(tmp_path / "out", force=False):
        ResultFolder.claim_folder(tmp_path / "out", force=True).__exit__()


def test_a_folder_of_results_is_claimed_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ResultFolder.claim_folder(out, force=False) as folder:
        folder.get_rank_log(0).write_text("mine")
        for force in (False, True):
            with pytest.raises(InputError, match=f"used by another run .process {os.getpid()} of "):
                ResultFolder.claim_folder(out, force=force)
        (out / LOCK).unlink()  # The user cleans up.
        with pytest.raises(InputError, match="holds an earlier run"):
            ResultFolder.claim_folder(out, force=False)
        assert folder.get_rank_log(0).read_text() == "mine"
    with ResultFolder.claim_folder(out, force=True):
        assert not folder.get_rank_log(0).exists()
    (out / LOCK).write_text("process 1 of a machine that lost its power")
    with ResultFolder.claim_folder(out, force=True):
        pass
    assert not (out / LOCK).exists()


def test_a_folder_that_was_refused_is_as_before(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    out.mkdir(parents=True)
    (out / "trace").write_text("a file of somebody")
    with pytest.raises(InputError, match=r"holds an earlier run .trace.;"):
        ResultFolder.claim_folder(out, force=False)
    assert [path.name for path in out.iterdir()] == ["trace"]
    (out / LOCK).symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="cannot be used: Too many levels of symbolic links"):
        ResultFolder.claim_folder(out, force=True)
