"""The versions of megatron-core that the tests train with; docs/versions.md has their numbers.

README, docs, `doctor` and the warning of `install()` take them from here.
"""

TESTED: dict[str, str] = {
    "0.16.1": "checkout",
    "0.17.1": "package",
    "0.18.2": "package",
    "0.19.2": "package",
    "0.20.0": "checkout",
}
"""Version → where its training code comes from."""

TESTED_PACKAGES = tuple(version for version, source in TESTED.items() if source == "package")
"""Those that the test suite installs; a checkout is named by hand (`tests.versions.table`)."""
