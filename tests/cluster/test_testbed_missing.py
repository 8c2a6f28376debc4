"""Sessions of tests name the testbed that is missing."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from testbed import catalog, selected


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
