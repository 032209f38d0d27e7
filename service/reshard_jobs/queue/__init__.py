"""The queue of jobs: states, owners, helpers, lists, repairs and removals."""
