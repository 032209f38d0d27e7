"""Container formats: torch's zip archives and legacy streams, read by byte ranges; zip and safetensors layouts."""
