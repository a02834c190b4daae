"""What people and programs read: terminal and JSON. A report prints; it never computes."""
