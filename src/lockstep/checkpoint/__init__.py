"""Checkpoints: atomic, verified, resumable; nothing is ever pickled or unpickled.

`codec` turns state into tensors and JSON, `storage` keeps checkpoints in folders that are whole or absent, as their
`manifest` says, `retention` decides which to keep. Where one rank has whole tensors, `writer` writes them in one pass
(`tensor_file`). Where tensors are spread over ranks, `sharded_writer` has each rank write its blocks by a `layout` that
all agree on (`ranges`). `reader` checks what was saved, by anybody, and has each rank read what it needs of it.
"""
