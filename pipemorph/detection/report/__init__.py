"""Changes of an observed job that its host does not have yet, and reports of them."""
