"""The rungs of the ladder, a file for each kind of change."""
