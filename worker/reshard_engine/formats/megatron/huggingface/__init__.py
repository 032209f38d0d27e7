"""Names of Hugging Face for checkpoints of Megatron-core, and the way back: rules as data, views, `config.json`."""
