"""A run's folder that is kept in object storage as well.

`bucket` is a folder in object storage through fsspec, `lease` says whose it is, `staging` is the folder on this host's
disk that stands for it, `uploads` brings that to the bucket, and `mirror` keeps both alike during a run.
"""
