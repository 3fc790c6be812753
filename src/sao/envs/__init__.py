"""Environments, tasks, tools and graders. No torch."""
