"""Training: the loop, run folders, checkpoints and ranks; sees engines only through their contract."""
