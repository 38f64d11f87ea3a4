"""What the fork server imports before it makes a process: all that every rank would import anyway."""

# ruff: noqa: E402

import gc

gc.disable()  # collecting takes a seventh of the time of the imports below

import atexit
import os
import warnings
import weakref

import torch._dynamo  # noqa: F401  every optimizer imports it, and it takes as long as torch itself

import lockstep.distributed.group
import lockstep.import_path
import lockstep.launchers.local.child
import lockstep.record.display
import lockstep.record.logs
import lockstep.record.run_folder
import lockstep.tasks.config_checks
import lockstep.tasks.predict  # not the worker: it is run as a module, which must not be loaded before
from lockstep.distributed.signals import adopt_orphans

lockstep.import_path.forget_safe_interpreters()
# What ranks leave behind becomes the server's, where the launcher finds it and ends it.
adopt_orphans()
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")


def _leave_at_once(server: int) -> None:
    # The fork server has nothing to put in order, and taking torch apart would take seconds.
    if os.getpid() == server:
        os._exit(0)


atexit.register(_leave_at_once, os.getpid())
# Nor do its ranks take torch apart at their end.
for finalizer in getattr(weakref.finalize, "_registry", ()):
    finalizer.atexit = False
# The collector of a rank does not look through what is here, which would copy the memory that all of them share.
gc.freeze()
gc.enable()
