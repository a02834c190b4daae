"""memtriage inside the tools that people already have. Each is thin."""
