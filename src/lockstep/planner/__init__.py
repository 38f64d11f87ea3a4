"""`lockstep plan`: whether a run fits devices that nobody has rented yet, and what a step of it costs."""
