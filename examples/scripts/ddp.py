"""Trains the recognizer of plain.py on several ranks: `torchrun --nproc-per-node 2 examples/scripts/ddp.py`."""

import argparse
from pathlib import Path

import torch
from plain import FOLDER, Recognizer, Speech, collate, loss_of
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    """Trains, and saves a checkpoint after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, default="runs/ddp")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    distributed.init_process_group()
    rank = distributed.get_rank()
    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = "cuda"
    torch.manual_seed(0)
    data = Speech(FOLDER / "speech_train.csv")
    sampler = DistributedSampler(data)
    train = DataLoader(
        data,
        batch_size=options.batch_size,
        sampler=sampler,
        collate_fn=collate,
        num_workers=1,
    )
    model = DistributedDataParallel(Recognizer().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(train):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            if step % 10 == 0 and rank == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), options.out / f"epoch-{epoch}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
