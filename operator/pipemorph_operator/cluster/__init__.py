"""The Kubernetes API: its client, and what is read of its objects."""
