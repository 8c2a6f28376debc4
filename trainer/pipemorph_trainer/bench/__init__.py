"""Measurements of links, for `pipemorph bench link` and `benchmarks/engine.py`."""
