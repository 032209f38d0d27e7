"""Container formats (torch archives, legacy torch streams, safetensors): readers of metadata, and layouts to write."""
