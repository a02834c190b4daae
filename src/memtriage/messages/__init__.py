"""What `memtriage explain` knows: from an error text or a whole log to what it proves, and to fixes."""
