"""Samples of one step into micro-batches on DP ranks. `pack.pack_step` is the way in.

`problem` has the data types; a construction, a search or a bound is a file each.
"""
