"""One rank of a job of many, without the others."""
