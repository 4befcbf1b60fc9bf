"""Data: samplers, sources, readers. Importing this package opens nothing and imports no framework."""
