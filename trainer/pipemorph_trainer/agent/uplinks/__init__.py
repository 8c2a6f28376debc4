"""What connects an agent upwards: to the ingest, or to the agent of its job."""
