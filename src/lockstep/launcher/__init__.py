"""How processes come to be: a plan, which is data and can be printed, and those who carry it out."""
