"""PyTorch behind the engine contract. Importing this package does not import torch; `engine` does."""
