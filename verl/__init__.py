"""The training framework: driver, workers, algorithms."""
