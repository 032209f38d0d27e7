"""The dashboard: pages that the service renders, with their forms, style sheets and scripts."""
