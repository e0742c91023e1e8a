"""Pretraining: tokens on disk, one optimizer step, checkpoints, the loop around them."""
