"""Generates the CRDs from the models of ``pipemorph.spec``."""
