"""Between rollouts and training: admission, baselines, packing. No torch."""
