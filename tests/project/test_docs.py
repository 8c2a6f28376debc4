"""The pages hold together: links lead somewhere, and files that a page names exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pipemorph.cli import parse_arguments

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
RUN_OUTPUTS = {
    "report.json", "status.json", "page.json", "timeline.json", "pipemorph.json",
    "diagnosis.json", "as-it-ran.json", "without-stragglers.json", "advice-1.json",
}  # fmt: skip


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
        if file not in RUN_OUTPUTS and not any(f"/{each}".endswith(f"/{file}") for each in FILES)
    ]
    assert not missing, f"{name} names files that do not exist"


def test_the_site_lists_every_page() -> None:
    listed = (ROOT / "docs/conf.py").read_text()
    pages = [name[len("docs/") : -len(".md")] for name in PAGES if name.startswith("docs/")]
    by_index = ("index", "decisions/0")
    missing = [
        each for each in pages if not each.startswith(by_index) and f'"{each}"' not in listed
    ]
    assert not missing, "add them to CONTENTS of docs/conf.py"


def test_the_threat_model_names_tests_that_exist() -> None:
    page = (ROOT / "docs/reference/attacks.md").read_text()
    found = re.findall(r"`([\w/]+\.py): (test_\w+)`", page)
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


MOST_WORDS, WIDTH, CELL_WORDS = 3000, 120, 45
"""Limits of the words of a page, of a line outside of code and tables, and of a cell."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_read_in_one_go(name: str) -> None:
    text = (ROOT / name).read_text()
    assert len(text.split()) <= MOST_WORDS, f"{name} is longer than {MOST_WORDS} words"
    lines = FENCED.sub("", text).splitlines()
    rows = [line for line in lines if line.lstrip().startswith("|")]
    long = [line for line in lines if len(line) > WIDTH and line not in rows]
    assert not long, f"{name} has lines of more than {WIDTH} characters"
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert all(len(cell.split()) <= CELL_WORDS for cell in cells), f"{name}: a cell is a paragraph"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert (len(text.splitlines()) <= 120, len(text.split()) <= 900) == (True, True)


SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", [name for name in PAGES if "```sh\n" in (ROOT / name).read_text()])
def test_commands_of_a_page_are_taken(name: str) -> None:
    """Blocks are scripts, and the arguments of each ``pipemorph`` in them exist."""
    for block in SHELL.findall((ROOT / name).read_text()):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
        for line in block.replace("\\\n", " ").splitlines():
            command = re.match(r"\s*pipemorph ([^|&;>]*)", line)
            if command is not None:
                parse_arguments(shlex.split(command[1], comments=True), "pipemorph")
