"""Faster imports of large packages."""
