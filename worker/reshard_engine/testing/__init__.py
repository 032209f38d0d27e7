"""What tests of this engine and of new formats build on: stores in memory, faults, strategies, laws.

Needs what tests need: the laws and strategies import Hypothesis, which is in the extra `dev`.
"""
