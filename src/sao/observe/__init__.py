"""Metrics, the inspector and the report. No torch."""
