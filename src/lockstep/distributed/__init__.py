"""Topology, rendezvous, the process group, the store, the roll call and the watch over ranks."""
