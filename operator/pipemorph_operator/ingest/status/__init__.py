"""The ingest's part of a job's status: what it says, and when it is written."""
