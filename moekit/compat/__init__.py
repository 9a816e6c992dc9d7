"""Layers with the interfaces of other libraries; moekit imports none of them."""
