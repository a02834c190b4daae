"""Runs a few lines in a new interpreter, where nothing else has allocated memory."""

import subprocess
import sys


def printed_by(script: str) -> list[int]:
    """Run a script and return the numbers that it prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]
