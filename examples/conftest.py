"""Here an example's own tests need it installed; tests/test_third_party.py sees to that."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("acme_moe") else ["custom_backend"]
