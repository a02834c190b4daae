"""The type of the fixture `refused` of the tests of commands."""

from collections.abc import Callable

Refused = Callable[..., str]
"""Takes arguments of a command that cannot do its work, and returns the line that says why."""
