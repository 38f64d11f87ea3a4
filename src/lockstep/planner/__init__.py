"""`lockstep plan`: whether a run fits devices that are not here, and what a step costs on them."""
