"""The GPU beside the host library: the driver found at run time, copies, and the turns of the hand-off."""
