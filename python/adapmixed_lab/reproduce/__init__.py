"""The paper's tables and figures with our programs, its numbers beside ours, and further studies.

Perplexities and data-dependent ε are functions of the private data: for the operator only.
"""
