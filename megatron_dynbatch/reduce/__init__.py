"""Token weights and weighted sums: the arithmetic every loss and metric is built on."""
