"""The playbook M1 to M21, and the texts of findings: why memory is used, and what to do.

Rules name a text by its key. `catalogue/` says what a library keeps, and what clears it.
"""
