"""The laboratory: audits, the paper's tables and figures, reports, DP-SGD.

It imports the library, `adapmixed`, which never imports it. The packages that it needs come with
``pip install 'adapmixed[lab]'``.
"""
