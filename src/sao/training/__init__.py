"""What updates weights."""
