"""The CRD, made from the models of ``pipemorph.api``."""
