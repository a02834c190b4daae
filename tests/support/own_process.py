"""A few lines run in an interpreter of their own, where nothing else has allocated memory."""

import subprocess
import sys


def printed_by(script: str) -> list[int]:
    """The numbers that a script prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]
