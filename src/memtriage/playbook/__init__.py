"""The playbook M1 to M21, and every text of advice that findings and reports show.

Rules name an entry by its key; the words are here and nowhere else.
"""
