"""Trains LightningModules: `task: {type: lockstep.adapters.lightning:Module, module: my.py:LitModel}`, or `fit`."""

from lockstep.adapters.lightning.fit import fit
from lockstep.adapters.lightning.task import Module

__all__ = ["Module", "fit"]
