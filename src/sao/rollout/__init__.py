"""Playing episodes: rendering, and the worker."""
