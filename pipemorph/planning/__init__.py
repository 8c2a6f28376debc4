"""Schedules: their form, their rules, how to make them and how to predict their time."""
