"""Rule-based policies: GPipe, 1F1B, zero-bubble, interleaved and V-shaped."""
