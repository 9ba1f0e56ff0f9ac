"""The paper's tables and figures, its numbers next to ours.

Perplexities and data-dependent ε are functions of the private data and for the operator only.
"""
