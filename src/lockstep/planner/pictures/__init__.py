"""The pictures of a plan's page, one file each: HTML and SVG as text, without anything that has to be fetched or run.

Shapes are stretched to the width of the page, and text is laid over them at places in percent: so it is as large on a
phone as on a desk. What is hovered over says its figures.
"""
