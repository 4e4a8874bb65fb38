"""`st.from_type(Predictions)`: small predictions with ties, near-certainties and classes of probability 0."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from enfold.metrics.predictions import Predictions


@st.composite
def _predictions(draw):
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(2, 5)))
    logits = draw(hnp.arrays(np.float64, shape, elements=st.floats(-20, 20, width=16)))
    if draw(st.booleans()):
        impossible = (logits < -5) & (logits.max(-1, keepdims=True) >= -5)
        logits[impossible] = -np.inf
    labels = draw(hnp.arrays(np.int64, shape[1], elements=st.integers(0, shape[2] - 1)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return Predictions.from_logits(torch.from_numpy(logits).to(dtype), torch.from_numpy(labels))


st.register_type_strategy(Predictions, _predictions())
