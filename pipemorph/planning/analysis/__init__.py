"""What a schedule wastes, where, and what would help."""
