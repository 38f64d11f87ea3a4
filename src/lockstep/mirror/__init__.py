"""A run's folder that is kept elsewhere as well: in object storage, or on the disk of another host.

`sync` brings a folder to a Remote piece by piece, `bucket` is a Remote in object storage through fsspec, `lease` says
whose a folder in it is, `staging` is the folder on this host's disk that stands for it, and `mirror` keeps both alike
during a run. Ray's nodes that do not see the driver's disk use `sync` alone.
"""
