"""The laboratory: audits, the paper's tables and figures, the report's page, DP-SGD.

It imports the library, `adapmixed`, which imports nothing of it but the page's writer, when one is
asked for. The packages that it needs come with ``pip install 'adapmixed[lab]'``.
"""
