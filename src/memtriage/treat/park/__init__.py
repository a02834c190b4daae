"""Parking: storages to the host and back, their device memory free meanwhile."""

from memtriage.treat.park.api import addresses, is_parked, park, park_rest, release_parking, unpark
from memtriage.treat.park.errors import ParkedError, ParkError, ParkRefused
from memtriage.treat.park.handle import Moved, Parked, Refusal

__all__ = [
    "Moved",
    "ParkError",
    "ParkRefused",
    "Parked",
    "ParkedError",
    "Refusal",
    "addresses",
    "is_parked",
    "park",
    "park_rest",
    "release_parking",
    "unpark",
]
