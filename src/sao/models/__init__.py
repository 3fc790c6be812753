"""Loading transformers models, and scoring tokens with them."""
