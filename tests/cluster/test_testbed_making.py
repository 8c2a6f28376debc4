"""Builds, installs and messages of `make testbeds`, and how a session finds out what is missing.

The testbeds here are made up: their parts are files, and nothing is built or installed.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from testbed import TestbedError, catalog, making, packages, selected
from testbed.catalog import Artifact, Testbed
from testbed.packages import Need
from testbed.steps import Say, run_step

FOREVER = ["sleep", "600"]


class Bench:
    """Makes testbeds whose parts are files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.installed: list[list[str]] = []
        self.said: list[str] = []

    def package(self, name: str) -> Need:
        return Need((name,), (self.folder / name).exists)

    def artifact(self, name: str, *needs: Need, error: str = "") -> Artifact:
        def make(say: Say, end: float) -> None:
            if error:
                raise TestbedError(error)
            (self.folder / name).touch()

        return Artifact(name, (self.folder / name).exists, make, needs)

    def endless(self, name: str) -> Artifact:
        def make(say: Say, end: float) -> None:
            run_step(f"building {name}", FOREVER, self.folder / "log", say, end)

        return Artifact(name, (self.folder / name).exists, make)

    def install(self, names: list[str], log: Path, say: Say, end: float) -> None:
        self.installed.append(names)
        for name in names:
            (self.folder / name).touch()

    def make(
        self, *testbeds: Testbed, may_install: bool = False, limit: float = 60.0
    ) -> making.Result:
        return making.make(testbeds, may_install=may_install, limit=limit, say=self.said.append)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(packages, "install", made.install)
    monkeypatch.setattr(packages, "can_install", lambda: True)
    monkeypatch.setattr(making, "command", lambda names: "make testbeds")
    return made


def two(bench: Bench) -> tuple[Testbed, Testbed]:
    """A testbed that needs a package, and one that needs another package to be built."""
    a, b = bench.package("deb-a"), bench.package("deb-b")
    return (
        Testbed("first", "", needs=(a,), artifacts=(bench.artifact("one"),)),
        Testbed("second", "", artifacts=(bench.artifact("two", b),)),
    )


def test_without_permission_it_builds_what_it_can_and_names_the_packages(bench: Bench) -> None:
    result = bench.make(*two(bench))
    assert result.status == making.PACKAGES_MISSING
    assert result.line == (
        "Debian packages are missing for first, second: `TESTBEDS_INSTALL=1 make testbeds` "
        "installs them as root, or run `apt-get install --yes --no-install-recommends deb-a deb-b`"
    )
    assert not bench.installed
    assert (bench.folder / "one").exists() and not (bench.folder / "two").exists()


def test_with_permission_all_packages_are_installed_in_one_transaction(bench: Bench) -> None:
    result = bench.make(*two(bench), may_install=True)
    assert result == making.Result(making.BUILT, "ready: first, second")
    assert bench.installed == [["deb-a", "deb-b"]]
    assert bench.make(*two(bench), may_install=True).status == making.BUILT
    assert len(bench.installed) == 1, "installed what is there"


def test_a_part_that_fails_is_one_line_and_the_others_are_built(bench: Bench) -> None:
    broken = Testbed("broken", "", artifacts=(bench.artifact("x", error="no x: exit 1\nits log"),))
    sound = Testbed("sound", "", artifacts=(bench.artifact("y"),))
    result = bench.make(broken, sound)
    assert result == making.Result(making.FAILED, "FAILED: broken: no x: exit 1")
    assert "no x: exit 1\nits log" in bench.said
    assert (bench.folder / "y").exists()


def test_at_the_limit_it_says_what_is_done_and_what_was_under_way(bench: Bench) -> None:
    bed = Testbed("bed", "", artifacts=(bench.artifact("quick"), bench.endless("slow")))
    later = Testbed("later", "", artifacts=(bench.artifact("never"),))
    result = bench.make(bed, later, limit=0.1)
    assert result.status == making.LIMIT_REACHED
    assert "done in this call: quick; under way: building slow, for " in result.line
    assert result.line.endswith("`make testbeds` goes on from here")
    assert not (bench.folder / "never").exists()


def test_a_machine_that_cannot_have_a_testbed_builds_the_others(bench: Bench) -> None:
    unfit = Testbed("pods", "", artifacts=(bench.artifact("x"),), unfit=lambda: "no root")
    fit = Testbed("api", "", artifacts=(bench.artifact("y"),))
    result = bench.make(unfit, fit)
    assert result == making.Result(making.FAILED, "ready: api; FAILED: pods: no root")
    assert not (bench.folder / "x").exists()


class Item:
    """Test item with the attributes that the plugin reads."""

    def __init__(
        self, *markers: str, fixtures: tuple[str, ...] = (), module: object = None
    ) -> None:
        self.markers, self.fixturenames, self.module = markers, fixtures, module

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


PROMETHEUS = SimpleNamespace(TESTBEDS=("prometheus",))


@pytest.mark.parametrize(
    ("item", "skipped", "testbeds"),
    [
        (Item(), "", set()),
        (Item("cluster", "kueue"), "", {"api", "kueue"}),
        (Item("node", fixtures=("project_archives",)), "", {"nodes", "images"}),
        (Item("node", "kueue"), "node", set()),
        (Item("cluster", module=PROMETHEUS), "", {"api", "prometheus"}),
        (Item("cluster", module=PROMETHEUS), "cluster", set()),
        (Item("rdma"), "", {"guests"}),
        (Item("rdma", fixtures=("browser",)), "rdma,browser", set()),
    ],
)
def test_the_testbeds_of_selected_tests_without_those_skipped(
    monkeypatch: pytest.MonkeyPatch, item: Item, skipped: str, testbeds: set[str]
) -> None:
    monkeypatch.setenv(selected.SKIP, skipped)
    assert selected.needed([item]) == testbeds  # type: ignore[list-item]


TESTS = """
TESTBEDS = ("browser",)
def test_one(): pass
def test_two(): pass
"""


@pytest.mark.parametrize(("skipped", "ends"), [("", "no tests ran"), ("browser", "2 skipped")])
def test_a_session_whose_testbed_is_missing_ends_with_one_line_or_skips(
    tmp_path: Path, skipped: str, ends: str
) -> None:
    (tmp_path / "conftest.py").write_text(
        "from testbed import selected\n"
        "def pytest_configure(config):\n    selected.use(config)\n    selected.use(config)\n"
    )
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {"PYTHONPATH": str(Path(__file__).parent), catalog.BROWSER: "/nowhere/chromium"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"],
        cwd=tmp_path,
        env=os.environ | environment | {selected.SKIP: skipped},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ends in done.stdout
    if skipped:
        assert done.returncode == 0 and not done.stderr
        return
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.strip() == (
        "ERROR: testbed browser is not ready: PIPEMORPH_TEST_BROWSER is /nowhere/chromium, "
        "which is no program; name one, or unset it; run `make testbeds` (docs/testbeds.md)"
    )
