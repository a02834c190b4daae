"""How messages about memory are worded, one file per group of families; `find.find` reads all of them."""
