"""Measuring links: what `pipemorph bench link` and `benchmarks/engine.py` have in common."""
