"""Worker processes: forked from one that has imported PyTorch, watched, and cleared up after; and plain pools."""
