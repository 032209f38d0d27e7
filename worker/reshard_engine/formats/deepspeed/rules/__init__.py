"""Rules that say how tensor parallelism cuts each parameter, by patterns of names or by affine maps."""
