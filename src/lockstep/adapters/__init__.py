"""Tasks made of what others wrote: each adapter is a Task, and the core knows nothing of it."""
