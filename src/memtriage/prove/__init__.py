"""A/B trials: the same job under named variants, in fresh processes, and what the marks say of each."""
