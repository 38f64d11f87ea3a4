"""The proof, before step 1, that the Topology is true: who is there, on what, and that they are one world."""
