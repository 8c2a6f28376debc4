"""``python -m pipemorph_operator.crd``: prints the CRD."""

import sys

from pipemorph_operator.crd.generate import render

if __name__ == "__main__":
    sys.stdout.write(render())
