"""The true library where it is installed and runs, else a stand-in for its extension module."""

import dataclasses

import kt_standin as standin
import moekit_ktransformers
import pytest
from moekit_ktransformers import library

import moekit

if not standin.REAL:
    library._extension = standin


@pytest.fixture(scope="session")
def backends() -> moekit.Registry:
    """The core's backends and this one, on the stand-in where the library cannot run."""
    found = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})
    for spec in moekit_ktransformers.moekit_experts():
        if not standin.REAL:
            spec = dataclasses.replace(spec, requires=(), check=None)
        found.register(spec)
    return found
