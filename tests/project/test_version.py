"""The version in ``pyproject.toml``: what derives it, and the copies that a script writes."""

from __future__ import annotations

import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import pipemorph

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: Path) -> ModuleType:
    spec = spec_from_file_location("release_version", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load_script(ROOT / "release/version.py")


def test_the_package_has_it_from_its_metadata() -> None:
    assert pipemorph.__version__ == release.read_version(), "installed for another: make setup"
    with pytest.raises(AttributeError, match="no_version"):
        _ = pipemorph.no_version


@pytest.mark.needs_engine
def test_the_engine_is_built_with_it() -> None:
    from pipemorph_trainer import _engine

    assert _engine.version == release.read_version(), "built for another version: make setup"


def test_copies_agree() -> None:
    copies = dict(release.copies_of(release.read_version()))
    names = {str(path.relative_to(ROOT)) for path in copies}
    assert names >= {"pyproject.toml", "CITATION.cff", "README.md", "docs/how-to/install.md"}
    wrong = [str(path) for path, text in copies.items() if text != path.read_text()]
    assert not wrong, f"release/version.py {release.read_version()} would change {wrong}"


def test_the_script_writes_every_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = release.read_version(), "12.3.0rc1"
    files = [path for path, _ in release.copies_of(old)]
    for path in [*files, ROOT / "release/version.py"]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    copied = load_script(tmp_path / "release/version.py")
    monkeypatch.setattr(sys, "argv", ["version.py", new])
    assert copied.main() == 0
    assert "charts/pipemorph-operator/Chart.yaml" in capsys.readouterr().out.splitlines()
    for path in files:
        changed = (tmp_path / path.relative_to(ROOT)).read_text()
        assert changed == path.read_text().replace(old, new), path
    monkeypatch.setattr(sys, "argv", ["version.py", "two"])
    assert copied.main() == 2
    assert "found ['two']; expected one version such as 0.2.0" in capsys.readouterr().err
