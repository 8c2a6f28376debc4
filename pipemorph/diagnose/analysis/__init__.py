"""Analysis of op tables: dependencies, simulation, slowdowns, causes and advice."""
