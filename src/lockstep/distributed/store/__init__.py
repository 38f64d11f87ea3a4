"""The store where the ranks of a run leave word, and nobody else: a small server of our own, and its clients."""
