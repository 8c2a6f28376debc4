"""Access to the Kubernetes API: the client, and parsers of its objects."""
