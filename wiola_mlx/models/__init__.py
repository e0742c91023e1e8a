"""The model files: they depend on mlx and mlx-lm only, and read like mlx-lm's own."""
