"""Environments and tools: adapters of other libraries, a Python tool, search over a small corpus."""
