"""Training programs from which users start; each is run as ``python -m`` on every rank."""
