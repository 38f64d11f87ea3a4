"""Checkpoints: atomic, verified, resumable; nothing is ever pickled or unpickled.

`codec` turns state into tensors and JSON, `snapshot` and `tensor_file` write these in one pass, `storage` keeps them in
folders that are whole or absent, as their `manifest` says, `retention` says which to keep. `writer` takes snapshots
and writes them while training goes on; `reader` brings one back to all ranks.
"""
