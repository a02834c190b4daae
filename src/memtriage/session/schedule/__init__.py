"""When censuses are taken: one scheduler for each scale that growth is counted in."""
