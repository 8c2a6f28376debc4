"""Parts of a release: locks, images, and the workflow that publishes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
TRAINER_TORCH = [*DEPENDENCIES, *EXTRAS["trainer"]]
LOCKS = {
    "build": [*PROJECT["build-system"]["requires"], "cmake>=3.20", "ninja>=1.11"],
    "operator": [*DEPENDENCIES, *EXTRAS["operator"]],
    "trainer-torch": TRAINER_TORCH,
    "trainer": [line for line in TRAINER_TORCH if not re.match("torch|numpy", line)],
    "numpy": ["numpy"],
}
"""Requirements that each lock is made from, by ``make locks``."""
PIN = re.compile(r"^(\S+)==(\S+?)(?: ; [^\\]*)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+")
WORKFLOW = ROOT / ".github/workflows/release.yml"


def read_pins(name: str) -> dict[str, set[str]]:
    """Versions by package. Fails on a line that is no pinned package or hash of one."""
    text, pins = (ROOT / f"release/locks/{name}.txt").read_text(), dict[str, set[str]]()
    while text:
        pin = PIN.match(text)
        assert pin, f"{name}.txt: {text.splitlines()[0]!r} is no version with hashes"
        pins.setdefault(canonicalize_name(pin[1]), set()).add(pin[2])
        text = text[pin.end() :]
    return pins


def test_each_lock_is_made_from_something() -> None:
    assert {path.stem for path in (ROOT / "release/locks").iterdir()} == LOCKS.keys()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_what_the_package_requires(name: str) -> None:
    pins = read_pins(name)
    for line in LOCKS[name]:
        wanted = Requirement(line)
        found = pins.get(canonicalize_name(wanted.name), set())
        unfit = [version for version in found if version not in wanted.specifier]
        assert found and not unfit, f"{name}.txt has {found or 'none'} for {line}: make locks"


def test_locks_of_the_trainer_have_the_same_versions() -> None:
    whole = read_pins("trainer-torch")
    for name in ("trainer", "numpy"):
        assert read_pins(name).items() <= whole.items()
    assert "torch" not in read_pins("trainer") and "numpy" not in read_pins("trainer")


def test_images_install_other_packages_by_hash_only() -> None:
    text = (ROOT / "Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", text).splitlines()
    named = re.findall(r"-r (\S+)|\$LOCKED (\S+?);?(?= |$)", "\n".join(lines))
    assert {Path(a or b).stem for a, b in named if "/" in (a or b)} == LOCKS.keys()
    for line in lines:
        if re.search(r" -r( |\"|$)", line):
            assert "--require-hashes -r" in line, line
    # From another index, so with hashes that no lock can have.
    assert len(re.findall("--extra-index-url", text)) == 1


def read_jobs() -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return jobs


def test_jobs_of_the_workflow_need_jobs_and_steps_that_exist() -> None:
    jobs = read_jobs()
    for name, job in jobs.items():
        needs = job.get("needs", [])
        needs = {needs} if isinstance(needs, str) else {*needs}
        assert needs <= jobs.keys() - {name}
        text = yaml.safe_dump(job)
        assert {*re.findall(r"needs\.(\w+)\.", text)} <= needs
        steps = {step["id"] for step in job["steps"] if "id" in step}
        assert {*re.findall(r"steps\.(\w+)\.", text)} <= steps
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])


def test_the_workflow_makes_what_exists_and_publishes_tags_only() -> None:
    text = WORKFLOW.read_text()
    made = re.findall(r'make (\w+) STEPS="([a-z ]+)"', text)
    listed = (ROOT / "release/dist.py").read_text()
    assert made and {target for target, _ in made} == {"dist"}
    assert all(f'"{step}": ' in listed for _, steps in made for step in steps.split())
    jobs = read_jobs()
    only_tags = "github.ref_type == 'tag'"
    assert jobs["publish"]["if"] == only_tags
    for step in jobs["images"]["steps"]:
        published = (
            step.get("with", {}).get("push") or "cosign" in str(step) or "attest" in str(step)
        )
        assert not published or step["if"] == only_tags, step


def test_the_workflow_names_no_digest_and_no_registry() -> None:
    """A digest that was not resolved is a guess, and names of hosts belong to who publishes."""
    text = WORKFLOW.read_text()
    assert not re.search(r"[0-9a-f]{40}", text)
    assert not re.search(r"\b[\w-]+\.(?:io|org|dev)/", re.sub(r"go run \S+", "", text))
