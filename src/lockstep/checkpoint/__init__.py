"""Checkpoints: atomic, verified, resumable; nothing is ever pickled or unpickled.

`codec` turns state into tensors and JSON, `storage` keeps checkpoints in folders that are whole or absent, as their
`manifest` says, `retention` decides which to keep. Where one rank has whole tensors, `writer` writes them in one pass
(`tensor_file`), and `reader` brings them back to all ranks. Where tensors are spread over ranks, `sharded_writer` has
each rank write its blocks by a `layout` that all agree on (`ranges`, `shard_reports`), and `sharded_reader` opens what
was saved, by anybody, for each rank to read what it needs.
"""
