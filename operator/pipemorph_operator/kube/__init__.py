"""Access to the Kubernetes API: client, informers, leader election, and parsers of objects."""
