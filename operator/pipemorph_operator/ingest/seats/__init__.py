"""Which replicas of the ingest serve, and which jobs are whose."""
