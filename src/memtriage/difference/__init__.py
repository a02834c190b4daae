"""Why one run, prediction or snapshot needs more memory than another."""
