"""Which pods of a job are there, and which of them has which place."""
