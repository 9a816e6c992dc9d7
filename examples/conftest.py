"""Collect an example's own tests where it is installed; test_third_party.py installs it."""

from importlib.metadata import entry_points

collect_ignore = [] if entry_points(group="moekit", name="acme") else ["custom_backend"]
