"""Members that the tests of compress have in common."""

import pytest

import enfold

from .helpers import TRAIN, make


@pytest.fixture(scope="session")
def members():
    ensemble = enfold.DeepEnsemble(make, 3, seed=0)
    enfold.fit(ensemble, TRAIN, epochs=40, lr=1e-2, batch_size=32, select="last", quiet=True)
    return ensemble
