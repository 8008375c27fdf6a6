"""See `tests.versions.cells`."""

from tests.versions.cells import main

main()
