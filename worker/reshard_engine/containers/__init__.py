"""Container formats: torch's archives and streams, safetensors: metadata by ranged reads, layouts to write."""
