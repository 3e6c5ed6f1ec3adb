"""Where expert blocks live and how they move: store (disk), tiers (sizes), streamer (drives the host library)."""
