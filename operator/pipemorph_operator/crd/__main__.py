"""``python -m pipemorph_operator.crd FOLDER…``: writes the CRDs into each folder."""

import sys
from pathlib import Path

from pipemorph_operator.crd.generate import render_files

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("expected folders to write the CRDs into, such as crds")
    for folder in map(Path, sys.argv[1:]):
        for name, text in render_files().items():
            (folder / name).write_text(text)
