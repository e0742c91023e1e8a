"""Conversion between model layouts; imported and installed as ``wiola_mlx.convert``."""
