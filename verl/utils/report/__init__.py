"""A run as people read it: its metrics, its episodes, and one HTML page of both."""
