"""Tasks made of what others wrote."""
