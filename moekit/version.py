"""The version of moekit."""

__version__ = "0.2.0"
