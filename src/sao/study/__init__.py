"""Studies: a grid of recipes over seeds, paired statistics, and a verdict per claim."""
