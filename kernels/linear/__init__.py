"""Linear layers in float32 with the same bits whatever the rows, threads or vector width."""
