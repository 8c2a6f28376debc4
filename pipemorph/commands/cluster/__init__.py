"""Subcommands that show jobs of a cluster, which kubectl reads with the user's credentials."""
