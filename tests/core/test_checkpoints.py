"""Folders of checkpoints: which count, whose they are, and which are deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipemorph.checkpoints import (
    FINISHED,
    MANIFEST,
    FileChecksum,
    UnfinishedCheckpoint,
    delete_old,
    delete_unfinished,
    list_resumable,
    read_checkpoint,
)


def save(directory: Path, iteration: int, run: str = "a", *, finish: bool = True) -> Path:
    found = UnfinishedCheckpoint(directory, iteration, run)
    (found.folder / "__0_0.distcp").write_text("data")
    if finish:
        found.write_checksums({"__0_0.distcp": FileChecksum(4, 7)})
        (found.folder / FINISHED).write_text("")
        found.close()
    else:
        os.close(found._fd)  # Simulates a process that was killed.
    return found.folder


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def resumed(directory: Path, run: str = "") -> list[str]:
    return [each.folder.name for each in list_resumable(directory, run)]


def test_a_run_deletes_its_own_old_ones_and_never_the_newest(tmp_path: Path) -> None:
    for iteration in (20, 30):
        save(tmp_path, iteration, "before")
    for iteration in (2, 4, 6, 8):
        save(tmp_path, iteration)
        delete_old(tmp_path, "a", 2)
    newest = ["iteration-00000006", "iteration-00000008"]
    assert names(tmp_path) == [*newest, "iteration-00000020", "iteration-00000030"]
    assert resumed(tmp_path)[:2] == newest[::-1]
    # A start from the beginning, as without a resume.
    save(tmp_path, 2)
    delete_old(tmp_path, "a", 2)
    assert names(tmp_path)[:2] == ["iteration-00000002", "iteration-00000008"]
    assert resumed(tmp_path, "a")[0] == "iteration-00000002"
    delete_old(tmp_path, "b", 1)
    assert len(names(tmp_path)) == 4


def test_two_jobs_live_side_by_side_in_one_directory(tmp_path: Path) -> None:
    for iteration in (2, 4, 6):
        for run in "ab":
            save(tmp_path, iteration, run)
            delete_old(tmp_path, run, 1)
    assert names(tmp_path) == ["iteration-00000006", "iteration-00000006.1"]
    for run, name in (("a", "iteration-00000006"), ("b", "iteration-00000006.1")):
        assert resumed(tmp_path, run)[0] == name


def test_a_second_save_replaces_the_first_once_it_is_whole(tmp_path: Path) -> None:
    first = save(tmp_path, 6)
    again = save(tmp_path, 6, finish=False)
    delete_old(tmp_path, "a", 1)
    assert first.exists()
    delete_unfinished(tmp_path, "a")
    assert not again.exists()
    again = save(tmp_path, 6)
    delete_old(tmp_path, "a", 2)
    assert names(tmp_path) == [again.name]


def test_a_clock_that_is_set_back_makes_none_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    monkeypatch.setattr("time.time_ns", lambda: 5)
    save(tmp_path, 4)
    delete_old(tmp_path, "a", 1)
    assert names(tmp_path) == ["iteration-00000004"]


@pytest.mark.parametrize(
    "name",
    ["iteration-final", "iteration-00000006-best", "best", "iteration-6", "iteration-00000099"],
)
def test_folders_of_a_user_are_neither_counted_nor_deleted(name: str, tmp_path: Path) -> None:
    """Holds also for a copy of a checkpoint under another name."""
    for iteration in (2, 4, 6):
        save(tmp_path, iteration)
    shutil.copytree(tmp_path / "iteration-00000006", tmp_path / name)
    (tmp_path / "iteration-00000008").mkdir()
    delete_old(tmp_path, "a", 2)
    delete_unfinished(tmp_path, "a")
    theirs = {name, "iteration-00000008"}
    assert {*names(tmp_path)} == {"iteration-00000004", "iteration-00000006", *theirs}
    assert resumed(tmp_path) == ["iteration-00000006", "iteration-00000004"]


def test_one_of_an_earlier_release_can_be_resumed_and_stays(tmp_path: Path) -> None:
    old = tmp_path / "iteration-00000050"
    old.mkdir()
    (old / FINISHED).write_text("")
    os.utime(old / FINISHED, (5, 5))
    save(tmp_path, 2)
    delete_old(tmp_path, "a", 1)
    assert resumed(tmp_path) == ["iteration-00000002", old.name]


def test_a_link_is_resumed_and_its_target_stays(tmp_path: Path) -> None:
    there = save(tmp_path / "elsewhere", 6)
    here = tmp_path / "here"
    here.mkdir()
    (here / there.name).symlink_to(there)
    save(here, 8)
    delete_old(here, "a", 1)
    assert resumed(here) == ["iteration-00000008", there.name]


def test_unfinished_checkpoints_are_deleted_unless_being_written(tmp_path: Path) -> None:
    temporary = [save(tmp_path, 2, run, finish=False) for run in ("a", "killed")]
    live = UnfinishedCheckpoint(tmp_path, 4, "other")
    delete_unfinished(tmp_path, "a")
    assert not any(path.exists() for path in temporary)
    assert names(tmp_path) == [live.folder.name]
    live.close()
    assert names(tmp_path) == []


def test_a_checkpoint_that_has_lost_a_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 2)
    cases = [
        ("__0_0.distcp", None, "__0_0.distcp: No such file or directory"),
        ("__0_0.distcp", "dat", "__0_0.distcp has 3 bytes instead of 4"),
        ("__0_0.distcp", "", "__0_0.distcp has 0 bytes instead of 4"),
        (MANIFEST, "{", f"{MANIFEST} is damaged"),
        (MANIFEST, "", f"{MANIFEST} is damaged"),
    ]
    for number, (name, content, why) in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        mine = Path(shutil.copytree(folder, directory / folder.name))
        (mine / name).unlink()
        if content is not None:
            (mine / name).write_text(content)
        found = read_checkpoint(mine)
        assert found is not None and found.damage == why
        assert [each.damage for each in list_resumable(directory)] == [why]
        delete_unfinished(directory, "a")
        assert mine.exists()
