"""Pages looked at in a browser; not part of the test suite."""
