"""The laboratory: audits, the paper's tables and studies, figures, DP-SGD.

It imports the library, `adapmixed`, which does not import it. Its packages come with
``pip install 'adapmixed[lab]'``.
"""
