"""A ConvNet on CIFAR-shaped images, as a tutorial writes it: `training_data`, an optimizer block, stage 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.launches import write_script
from tests.harness.scripts import run_script

SCRIPT = """
    import argparse, os
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    import hf_zero

    class ConvNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 8, 3, 1)
            self.conv2 = nn.Conv2d(8, 16, 3, 1)
            self.fc1 = nn.Linear(16 * 6 * 6, 32)
            self.fc2 = nn.Linear(32, 10)

        def forward(self, x):
            if next(self.parameters()).dtype != x.dtype:
                x = x.to(next(self.parameters()).dtype)
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            x = x.view(-1, 16 * 6 * 6)
            return self.fc2(F.relu(self.fc1(x)))

    class Images(torch.utils.data.Dataset):
        "Ten patterns, each with noise: what an image shows can be learnt."

        def __init__(self, count):
            generator = torch.Generator().manual_seed(0)
            patterns = torch.randn(10, 3, 32, 32, generator=generator)
            self.labels = torch.arange(count) % 10
            self.images = patterns[self.labels] + torch.randn(count, 3, 32, 32, generator=generator)

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, index):
            return self.images[index], int(self.labels[index])

    def train(args):
        torch.manual_seed(0)
        model = ConvNet()
        model_engine, optimizer, train_loader, _ = hf_zero.initialize(
            args=args, model=model, model_parameters=model.parameters(), training_data=Images(640))
        assert args.local_rank == int(os.environ["LOCAL_RANK"])
        for epoch in range(args.epochs):
            model_engine.train()
            right = seen = 0
            for batch_idx, (inputs, targets) in enumerate(train_loader):
                inputs, targets = inputs.to(model_engine.device), targets.to(model_engine.device)
                outputs = model_engine(inputs)
                loss = F.cross_entropy(outputs, targets)
                model_engine.backward(loss)
                model_engine.step()
                right += (outputs.argmax(1) == targets).sum().item()
                seen += len(targets)
            os.write(1, f"{epoch} {args.local_rank} {batch_idx + 1} {seen} {right / seen} {loss.item()}\\n".encode())

    def get_args():
        parser = argparse.ArgumentParser(description="CIFAR10 Training")
        parser.add_argument("--epochs", type=int, default=10)
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--deepspeed_config", type=str, default="ds_config.json")
        return parser.parse_args()

    if __name__ == "__main__":
        train(get_args())
"""

CONFIG = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-08, "weight_decay": 3e-07}},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_convnet(processes: int, tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT, "train_cifar.py")
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    line = ["--deepspeed_config", "ds_config.json", "--epochs", 5]
    job = run_script(script, *line, folder=tmp_path, processes=processes)
    assert job.status == [0] * processes, job.err
    rows = sorted([float(part) for part in text.split()] for text in job.out.splitlines())
    assert [row[:4] for row in rows] == [
        [epoch, rank, 20.0, 640 / processes] for epoch in range(5) for rank in range(processes)
    ]
    accuracy = [row[4] for row in rows if row[1] == 0]
    assert accuracy[0] < 0.9 and accuracy[-1] > 0.9, rows
