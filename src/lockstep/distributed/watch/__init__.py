"""Heartbeats, stall detection and stack dumps: who is stuck, where, and who waits for them."""
