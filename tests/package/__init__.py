"""The built package in environments of its own; not part of the test suite."""
