"""Checkpoints: atomic, verified, resumable; nothing is ever pickled or unpickled.

`codec` turns state into tensors and JSON, `store` keeps them in folders that are whole or absent, `retention` says
which to keep, `saver` takes the snapshot and writes it while training goes on.
"""
