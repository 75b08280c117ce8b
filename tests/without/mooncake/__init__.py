"""Mooncake as it is where the libraries that its engine loads are not installed; put `tests/without` on PYTHONPATH."""
