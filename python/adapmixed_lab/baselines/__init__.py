"""The field's ways to answer privately, as mechanisms beside ours on the same accountant."""
