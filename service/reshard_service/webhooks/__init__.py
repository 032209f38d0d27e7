"""Webhooks that leave the service."""
