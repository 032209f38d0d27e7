"""Files of distributed checkpoints of torch, whoever saved them: `.metadata`, records of chunks, and the state dict."""
