"""Commands that write manifests and describe them."""
