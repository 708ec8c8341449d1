"""Seconds until all is ready, in fresh processes."""
