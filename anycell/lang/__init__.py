"""The cell language: expressions, the op table, tracing and reverse mode.

Knows no device and no framework.
"""
