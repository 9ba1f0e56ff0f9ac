"""One adapter trained with DP-SGD on the same corpus, the published baseline."""
