"""One small exported llama that tests may share, and one torch thread per worker."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tiny import tiny
from torch import Tensor

from exgen import export_for_generation

torch.set_num_threads(1)  # two OpenMP pools on two cores run at a hundredth of the speed of one


class Saved(NamedTuple):
    file: Path  # a tiny llama, exported and saved
    prompt: Tensor  # [1, 4]
    beams: list[int]  # what eager answers with 3 beams and 5 new tokens, prompt included


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model, file = tiny("llama"), tmp_path_factory.mktemp("saved") / "tiny.pt2"
    prompt = torch.tensor([[5, 6, 7, 8]])
    torch.export.save(export_for_generation(model), file)
    return Saved(file, prompt, model.generate(prompt, num_beams=3, max_new_tokens=5, do_sample=False)[0].tolist())
