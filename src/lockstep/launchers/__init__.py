"""How processes come to be, by whichever launcher a config names."""
