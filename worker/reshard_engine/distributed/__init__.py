"""One conversion on many workers: runs of units, claims, journal segments, epochs and the election of a committer."""
