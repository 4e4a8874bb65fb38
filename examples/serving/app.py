"""An exported ensemble behind a server: class, probability and uncertainty for each example.

    pip install fastapi uvicorn onnxruntime
    MODEL=runs/clothes.onnx uvicorn app:app --port 8000

Neither torch nor enfold is needed here.
"""

import json
import os

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1  # requests run side by side
session = onnxruntime.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])
entry = session.get_inputs()[0]
dtype = {"tensor(uint8)": np.uint8, "tensor(float)": np.float32}[entry.type]
about = json.loads(session.get_modelmeta().custom_metadata_map["enfold"])
REJECT = float(os.environ.get("REJECT", "inf"))  # entropy above which an answer is left to a person

app = FastAPI()


class Question(BaseModel):
    """A batch of inputs as nested lists."""

    inputs: list


@app.get("/about")
def describe() -> dict:
    """Return what is stored in the file about the model."""
    return about


@app.post("/predict")
def predict(question: Question) -> list[dict]:
    """Return a prediction with its uncertainty for each example."""
    try:
        inputs = np.asarray(question.inputs, dtype)
    except (ValueError, OverflowError) as error:
        raise HTTPException(422, f"inputs must be numbers of type {dtype.__name__}: {error}") from error
    if inputs.ndim != len(entry.shape) or list(inputs.shape[1:]) != entry.shape[1:]:
        raise HTTPException(422, f"inputs must have the shape {['batch', *entry.shape[1:]]}, got {list(inputs.shape)}")
    probabilities, entropy, mutual_information = session.run(None, {entry.name: inputs})
    return [
        {
            "class": int(row.argmax()),
            "probability": float(row.max()),
            "entropy": float(total),
            "mutual_information": float(between),
            "reject": bool(total > REJECT),
        }
        for row, total, between in zip(probabilities, entropy, mutual_information, strict=True)
    ]
