"""Server-side copies: chunks that a store copies from source objects itself."""
