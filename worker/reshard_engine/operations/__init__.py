"""The operations of the engine for users, one module each."""
