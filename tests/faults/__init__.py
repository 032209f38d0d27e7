"""Faults at every operation of a small conversion, concurrent conversions, and kills."""
