"""The caching allocator: the replay of recorded traces, and a simulator."""
