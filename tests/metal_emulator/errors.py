class MetalError(Exception):
    """A fault of a kernel: of its text, or while it ran."""
