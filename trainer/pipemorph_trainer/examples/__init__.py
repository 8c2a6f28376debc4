"""Training programs a user starts from; each is run as ``python -m`` on every rank."""
