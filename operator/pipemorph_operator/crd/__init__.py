"""Generates the CRD from the models of ``pipemorph.api``."""
