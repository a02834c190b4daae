"""The playbook M1 to M21, and what findings say: why it is so, and what to do.

Rules name a text by its key. What one library keeps is said in `catalogue/`, with what clears it.
"""
