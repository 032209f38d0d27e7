"""Pictures of checkpoints and results, for the command line, notebooks and pages."""
