"""Pictures of layouts as SVG: rows and parts say what to draw, marks how it looks, bars and movement where it goes."""
