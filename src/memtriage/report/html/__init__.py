"""Self-contained HTML pages: the shell, the packing of numbers, the choice of points. Knows no report."""
