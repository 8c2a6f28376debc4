"""Who is where: ranks, groups, machines and their devices."""
