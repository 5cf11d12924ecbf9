"""The operations on compressed weights: a torch reference, native kernels, and which one runs."""
