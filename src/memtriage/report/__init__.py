"""What people and programs read: terminal, JSON, HTML, metrics. One folder per product.

A report prints and never computes. What several reports share is directly in this folder.
"""
