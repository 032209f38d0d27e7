"""Real DeepSpeed as an oracle: it trains, saves and reloads; tests compare Reshard with what it says."""
