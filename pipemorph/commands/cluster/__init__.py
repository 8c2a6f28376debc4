"""Subcommands that look at jobs of a cluster, which kubectl reads with the user's credentials."""
