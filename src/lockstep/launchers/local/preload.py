"""What the fork server imports before it makes a process: everything that every rank would import anyway."""

# ruff: noqa: E402

import gc

gc.disable()  # looking for garbage takes a seventh of the time that the imports below take

import atexit
import os
import warnings
import weakref

import torch._dynamo  # noqa: F401  every optimizer imports it, and it takes as long as torch itself

import lockstep.import_path
import lockstep.launchers.local.child
import lockstep.record.display
import lockstep.record.logs
import lockstep.record.run_folder
import lockstep.tasks.predict  # not the worker: it is run as a module, which must not be loaded before
from lockstep.distributed.signals import adopt_orphans

lockstep.import_path.forget_safe_interpreters()
# What ranks leave behind becomes the server's, where the launcher finds it and ends it.
adopt_orphans()
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")


def _leave_at_once(server: int) -> None:
    """The fork server has nothing to put in order, and taking torch apart would keep it for seconds."""
    if os.getpid() == server:
        os._exit(0)


atexit.register(_leave_at_once, os.getpid())
# Nor do its ranks put in order at their end what was made here: they take torch apart no more than their server does.
for finalizer in getattr(weakref.finalize, "_registry", ()):
    finalizer.atexit = False
# What is here stays: the collector of a rank need not look through it, nor copy the memory that all of them share.
gc.freeze()
gc.enable()
