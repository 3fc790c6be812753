"""The method: pure functions over tensors. Imports torch only."""
