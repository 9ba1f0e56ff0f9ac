"""One adapter trained with DP-SGD: the published baseline, on the same corpus."""
