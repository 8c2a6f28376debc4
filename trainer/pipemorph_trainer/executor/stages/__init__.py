"""What runs a stage's ops: its interface, and the emulated accelerator."""
