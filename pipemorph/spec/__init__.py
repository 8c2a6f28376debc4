"""Pydantic models of the job and its status, from which the CRD is generated."""
