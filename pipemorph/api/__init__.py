"""The job and its status as pydantic models, from which the CRD is generated."""
