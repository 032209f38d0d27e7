"""Tenants, their callers, and what administrators did."""
