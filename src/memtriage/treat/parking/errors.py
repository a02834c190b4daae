"""Errors and warnings of parking."""

from __future__ import annotations


class ParkError(RuntimeError):
    """Something cannot be parked or brought back; nothing was moved. The text says what and why."""


class ParkedError(ParkError):
    """A parked tensor was used: its values are on the host, its device memory is freed."""


class ParkRefused(RuntimeWarning):
    """Some of the chosen storages cannot be parked and stay where they are."""
