"""What the plugin adds to optimizers; nothing here knows of schedules."""
