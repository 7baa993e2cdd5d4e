"""Settings shared by all tests: plots without a screen, reproducible hypothesis examples, GPU tests only with a GPU."""

import os

# Through the environment, so that other processes draw without a screen too. The matrices of these tests are tiny: a
# second thread costs more than it brings, above all on a busy machine.
os.environ |= {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# derandomize: the same examples on every run. No deadline: the first call of a kernel may compile.
settings.register_profile("ntk_iterncgp", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("ntk_iterncgp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if needs_gpu and not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch finds none"))
