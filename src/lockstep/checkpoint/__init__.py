"""Checkpoints: atomic, verified, resumable; nothing is ever pickled or unpickled.

`codec` turns state into tensors and JSON, `storage` keeps checkpoints in folders that are whole or absent, as their
`manifest` says, `retention` says which to keep. Where one rank has whole tensors, `writer` takes a `snapshot` and
writes it in one pass (`tensor_file`), and `reader` brings it back to all ranks. Where tensors are spread over ranks,
`owners` has each rank write its own parts by a `layout` that all agree on (`parts`, `ranges`; `words` is how they talk
meanwhile), and `sliced` opens what was saved, by anybody, for each rank to read what it needs (`stored`).
"""
