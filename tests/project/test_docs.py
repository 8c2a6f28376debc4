"""The pages hold together: links lead somewhere, and files that a page names exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT, check=True, capture_output=True, text=True,
).stdout.splitlines()  # fmt: skip
PAGES = [
    name
    for name in FILES
    if name.endswith(".md")
    and not name.startswith(("tests/", "shared/"))
    and (ROOT / name).exists()
]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|pyi|cpp|hpp|md|yaml|json|svg))`")
LEFT_BY_A_RUN = {"report.json", "timeline.json", "pipemorph.json"}


def prose(name: str) -> str:
    return FENCED.sub("", (ROOT / name).read_text())


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and MyST make them, and those that the page sets."""
    text = FENCED.sub("", page.read_text())
    found = set(re.findall(r'<a id="([\w-]+)">', text))
    for line in text.splitlines():
        if line.startswith("#"):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(title.replace(" ", "-"))
    return found


def test_there_are_pages() -> None:
    assert {"README.md", "docs/index.md", "docs/ARCHITECTURE.md", "CONTRIBUTING.md"} <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    page = ROOT / name
    broken = []
    for link in LINK.findall(prose(name)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{name}: broken links"


@pytest.mark.parametrize("name", PAGES)
def test_files_that_are_named(name: str) -> None:
    missing = [
        file
        for file in NAMED_FILE.findall(prose(name))
        if file not in LEFT_BY_A_RUN and not any(f"/{each}".endswith(f"/{file}") for each in FILES)
    ]
    assert not missing, f"{name} names files that do not exist"


def test_the_threat_model_names_tests_that_exist() -> None:
    found = re.findall(r"`([\w/]+\.py): (test_\w+)`", (ROOT / "docs/security.md").read_text())
    assert len(found) > 20
    for file, test in found:
        path = ROOT / (file if "/" in file else f"tests/cluster/{file}")
        assert re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), test


@pytest.mark.parametrize("name", PAGES)
def test_rows_of_tables_follow_their_head(name: str) -> None:
    """A blank line ends a table: rows below it are shown as text."""
    blocks = re.split(r"\n\s*\n", prose(name))
    tables = [each.strip().splitlines() for each in blocks if each.strip().startswith("|")]
    torn = [rows[0] for rows in tables if not re.fullmatch(r"\s*\|[\s:|-]+\|", [*rows, ""][1])]
    assert not torn, f"{name}: rows of a table without its head"
