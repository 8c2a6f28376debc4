"""The version in ``pyproject.toml``: every other place that names it agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import pipemorph

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHART = ROOT / "charts/pipemorph-operator"
IMAGE_TAG = re.compile(r"pipemorph[/-](?:operator|trainer):(\d[\w.-]*)")
NAMES_IMAGES = (
    "README.md",
    "Dockerfile",
    "docs/how-to/install.md",
    "examples/kubernetes/eight-gpus.yaml",
    "examples/kubernetes/gpt.yaml",
    "examples/kubernetes/hf-llama.yaml",
    "examples/kubeflow/runtime.yaml",
    "tests/cluster/node_support.py",
)


def test_the_package() -> None:
    assert pipemorph.__version__ == VERSION


@pytest.mark.needs_engine
def test_the_engine() -> None:
    from pipemorph_trainer import _engine

    assert _engine.version == VERSION, "built for another version: make setup"


def test_the_chart() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_citation() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION


def test_the_images_that_tests_build() -> None:
    lines = (ROOT / "tests/cluster/testbed/project_images.py").read_text().splitlines()
    assert f'VERSION = "{VERSION}"' in lines


@pytest.mark.parametrize("name", NAMES_IMAGES)
def test_image_tags(name: str) -> None:
    tags = {tag.rstrip(".") for tag in IMAGE_TAG.findall((ROOT / name).read_text())}
    assert tags == {VERSION}, f"{name} names images of other versions than pyproject.toml"
