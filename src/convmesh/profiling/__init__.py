"""Profiling: what ranks did and when, where it came from, and what it means. No framework, no device."""
