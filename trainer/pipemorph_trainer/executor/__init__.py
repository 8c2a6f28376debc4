"""What one iteration of one stage is made of: its token, its ops, its loss, and waiting."""
