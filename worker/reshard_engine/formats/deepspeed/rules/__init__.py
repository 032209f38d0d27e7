"""Rules of tensor parallelism: which parameter is cut how, by patterns of names or by affine maps."""
