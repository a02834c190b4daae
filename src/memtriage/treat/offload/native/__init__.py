"""The compiled kernel: made on the user's machine, proven against torch's bits, then used."""
