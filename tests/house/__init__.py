"""Helpers of the tests of the house."""
