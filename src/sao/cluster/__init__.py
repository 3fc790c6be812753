"""A run's parts on the nodes of a Ray cluster; the only place that imports Ray."""
