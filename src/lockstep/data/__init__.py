"""Examples in order: which of them a rank takes in which global batch, and how they are fetched."""
