"""Single-Rollout Asynchronous Optimization: train LLM agents from single finished rollouts, as they finish."""

__version__ = "0.1.0"
