"""moekit inside other libraries. A module imports its library only when it is used."""
