"""One conversion on many workers: runs of units, claims, journal segments, sessions and the election of a committer."""
