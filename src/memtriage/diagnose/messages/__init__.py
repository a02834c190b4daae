"""The grammar of messages about memory: one file a group of families. `find.find` reads all of a text."""
