"""``python -m moekit``."""

import sys

from moekit.cli.main import main

if __name__ == "__main__":
    sys.exit(main(owns_stdout=True))
