"""Self-contained HTML pages: the shell, the packing of numbers, the choice of points, scripts and styles.

Knows nothing of memory.
"""
