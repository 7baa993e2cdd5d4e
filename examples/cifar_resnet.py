"""The public CIFAR-10 ResNet-20, weights and BatchNorm unchanged, and the posterior of all its 272 474 weights.

    .venv/bin/python examples/cifar_resnet.py           with CIFAR-10 and the checkpoint under NTK_ITERNCGP_DATA
    .venv/bin/python examples/cifar_resnet.py --toy     a few random images and an untrained network: does it run?

Shows the pieces that `ntk-iterncgp evaluate configs/cifar10_resnet20.yaml` is made of: a built-in network, a
checkpoint, a data set, the flavour, its calibration, and probabilities by quadrature.
"""

import sys

import torch
from laplace import Laplace
from torch.utils.data import DataLoader, Subset, TensorDataset

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")
from ntk_iterncgp.experiments import datasets, models
from ntk_iterncgp.experiments.config import DataConfig
from ntk_iterncgp.experiments.evaluation import classification_metrics


def main(toy: bool) -> None:
    torch.manual_seed(0)
    model = models.build("cifar_resnet20", num_classes=10, input_shape=(3, 32, 32))
    if toy:
        train = held_out = test = TensorDataset(torch.randn(24, 3, 32, 32), torch.arange(24) % 10)
    else:
        config = DataConfig(name="cifar10", train_limit=1000)
        data = datasets.load(config, seed=0)
        train, held_out, test = data.train, Subset(data.test, range(300)), Subset(data.test, range(300, 800))
        checkpoint = datasets.data_root(config) / "pretrained" / "cifar10_resnet20.safetensors"
        models.load_checkpoint(model, checkpoint, "cifar_resnet20")

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp", num_actions=20)
    la.fit(DataLoader(train, batch_size=100), progress_bar=not toy)
    print(la.report_)
    print(la.calibrate(DataLoader(held_out, batch_size=100)))  # on images that the network was not trained on

    x, y = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        alone = model(x).softmax(1)
    for name, p in (("network as it is", alone), ("with its posterior", la(x, link_approx="quadrature"))):
        scores = classification_metrics(p, y)
        print(f"{name:18}: accuracy {scores.accuracy:.3f}, NLL {scores.nll:.3f}, ECE {scores.ece:.3f}")


if __name__ == "__main__":
    main(toy="--toy" in sys.argv)
