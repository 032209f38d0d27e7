"""Tools for tests of this engine and of new formats: stores in memory, faults, strategies, laws.

The laws and strategies import Hypothesis, which is in the extra `dev`.
"""
