"""What parking raises and warns of."""

from __future__ import annotations


class ParkError(RuntimeError):
    """Parking was asked for something that cannot be: nothing was moved. The text says what and why."""


class ParkedError(ParkError):
    """A parked tensor was used: its values are on the host, its device memory was given back."""


class ParkRefused(RuntimeWarning):
    """Some of the chosen storages cannot be parked and stay where they are."""
