"""Triton device code that moekit's expert backends share.

Import from the submodules `align`, `sorted_rows`, `rows`, `numerics` and `launch`; the
names in their ``__all__`` are public. Importing this package alone does not import triton.
"""
