"""The durable rollout log and the run folder. No torch."""
