"""The search agent: episodes, tools, search."""
