"""When a census is taken, and how: `scheduler.py` decides on the run, `microbatch.py` within a step."""
