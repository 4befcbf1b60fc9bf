"""The planner: what a plan would cost on given devices, and which plan costs least."""
