"""Plans: which bytes of which files each unit of work writes. Pure, deterministic, JSON."""
