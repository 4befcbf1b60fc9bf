"""Profiles that other tools have written: found, read in a stream, and brought into ConvMesh's events."""
