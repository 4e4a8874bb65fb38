"""Export: three networks for images of clothes, calibrated, as one ONNX file with probabilities and uncertainty.

The file takes bytes, because it contains the normalization, and needs neither torch nor enfold where it is used.
"""

import numpy as np
import onnxruntime
import torch

import enfold
from enfold.networks import MLP


def plot(images: torch.Tensor, probabilities: np.ndarray, disagreement: np.ndarray, file: str) -> None:
    """Draw the images on which the members disagree most, with the two most probable classes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 5, figsize=(8, 2.2), layout="constrained")
    for part, index in zip(axes, disagreement.argsort()[::-1], strict=False):
        first, second = probabilities[index].argsort()[:-3:-1]
        part.imshow(images[index, 0], cmap="gray_r")
        title = f"class {first}: {probabilities[index, first]:.2f}\nclass {second}: {probabilities[index, second]:.2f}"
        part.set_title(f"{title}\n{disagreement[index]:.2f} nats", fontsize=9)
        part.axis("off")
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train, export, quantize, and predict by ONNX Runtime alone."""
    data = enfold.data.load("fashion-mini")
    ensemble = enfold.DeepEnsemble(lambda: MLP(784, [64], 10), 3)
    enfold.fit(ensemble, data, epochs=3, lr=3e-3, quiet=True)
    net = enfold.distill(ensemble, data, epochs=3, lr=1e-3, quiet=True)
    print(enfold.evaluate(ensemble, data, name="ensemble"))
    print(enfold.evaluate(net, data, reference=ensemble, name="distilled"))

    calibrated = enfold.calibrate(ensemble, data.val)
    inputs = data.test.inputs[:32]
    print(enfold.export(calibrated, "runs/clothes.onnx", example=inputs, preprocess=data))

    small = enfold.export(
        net,
        "runs/clothes-int8.onnx",
        example=inputs,
        preprocess=data,
        task="classification",
        quantize="static",
        calibrate_on=data,  # its validation split
        test=data,
    )
    print(small)

    session = onnxruntime.InferenceSession("runs/clothes.onnx")
    probabilities, entropy, mutual_information = session.run(None, {"input": inputs.numpy()})
    least = int(mutual_information.argmax())
    print(
        f"the members disagree most on example {least}: class {probabilities[least].argmax()} with probability "
        f"{probabilities[least].max():.2f}, entropy {entropy[least]:.2f}, label {int(data.test.labels[least])}"
    )
    plot(inputs, probabilities, mutual_information, "runs/disagreement.png")
    expected = calibrated.predict(data.prepare(inputs)).mean
    print(f"largest difference from torch: {float((torch.from_numpy(probabilities) - expected).abs().max()):.1e}")


if __name__ == "__main__":
    main()
