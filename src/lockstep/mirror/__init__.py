"""A run's folder that is kept somewhere else as well: in object storage, or on the disk of another host.

`remote` is what such a place can do, `sync` brings a folder there piece by piece, `bucket` is object storage through
fsspec, `lease` says whose a folder in it is, `staging` is the folder on this host's disk that stands for it, and
`mirror` keeps both alike while a run is at work. Ray's nodes with disks of their own use the first two.
"""
