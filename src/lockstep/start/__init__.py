"""From a config to ranks that train, by whichever launcher it names: what the command line and `lockstep.train` share.

Like the command line, it imports torch only where it is needed.
"""
