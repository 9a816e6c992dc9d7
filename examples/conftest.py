"""Collect an example's own tests where it is installed; test_third_party.py installs it."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("acme_moe") else ["custom_backend"]
