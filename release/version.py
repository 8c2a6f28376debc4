"""Sets the project's version: ``python release/version.py 0.2.0``.

The version is the one in ``pyproject.toml``. The package reads it from its metadata, the engine and
the images are built with it, and this script writes it into what is copied or applied as it stands:
the chart's metadata, the citation, and the tags of images in pages and examples.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = ROOT / "pyproject.toml"
_VERSION = r"\d+\.\d+\.\d+[\w.+-]*?(?=\.?(?:\s|[`\"'),]|$))"
_IMAGE_TAG = rf"(pipemorph[/-](?:operator|trainer):){_VERSION}"
_FIELDS = {
    PYPROJECT: rf'(?m)(^version = "){_VERSION}',
    ROOT / "CITATION.cff": rf"(?m)(^version: ){_VERSION}",
    ROOT / "charts/pipemorph-operator/Chart.yaml": rf"(?m)(^(?:version|appVersion): ){_VERSION}",
}
_PAGES = ("README.md", "Dockerfile", "docs/**/*.md", "examples/**/*.yaml")


def read_version() -> str:
    version: str = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
    return version


def copies_of(version: str) -> Iterator[tuple[Path, str]]:
    """Yield each file that names a version, and its text with ``version``."""
    patterns = dict(_FIELDS)
    for page in _PAGES:
        patterns |= dict.fromkeys(sorted(ROOT.glob(page)), _IMAGE_TAG)
    for path, pattern in patterns.items():
        text, count = re.subn(pattern, rf"\g<1>{version}", path.read_text())
        if count:
            yield path, text


def main() -> int:
    if len(sys.argv) != 2 or not re.fullmatch(_VERSION, sys.argv[1]):
        print(f"version: found {sys.argv[1:]}; expected one version such as 0.2.0", file=sys.stderr)
        return 2
    for path, text in copies_of(sys.argv[1]):
        if text != path.read_text():
            path.write_text(text)
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
