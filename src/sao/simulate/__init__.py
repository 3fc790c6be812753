"""The loop on the virtual clock, with an engine and a trainer that only cost time."""
