"""Does a counter or a holder grow, since when, by how much, and how small a leak would have been seen?

Statistics over marks and censuses; what the growth is called is decided in the folder above.
"""
