"""What a program needs in host memory: its tensors, files, workers and libraries, over time."""
