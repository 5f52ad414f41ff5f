"""Train a small BERT, made from a config, on the sources of Python: Hugging Face's Trainer over
accelerate over gloo.

    PYTHONPATH=.. torchrun --standalone --nproc-per-node 2 train.py --steps 40
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from record import Record
from stdlib_text import stdlib_text

LENGTH = 64
MASK = 256  # tokens are bytes, and this


class Text(Dataset):
    """Pieces of the standard library, one byte in seven masked."""

    def __init__(self) -> None:
        self.pieces = stdlib_text(1 << 20).view(-1, LENGTH).long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.pieces[index]
        masked = torch.arange(LENGTH) % 7 == index % 7
        labels = piece.masked_fill(~masked, -100)
        return {"input_ids": piece.masked_fill(masked, MASK), "labels": labels}


class RecordingTrainer(Trainer):
    """Keeps the losses as they are: logs have four digits."""

    def training_step(self, *args, **kwargs):
        self.last_loss = super().training_step(*args, **kwargs)
        return self.last_loss


class RecordSteps(TrainerCallback):
    def __init__(self, record: Record, trainer: RecordingTrainer) -> None:
        self.record, self.trainer = record, trainer

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.record.step(self.trainer.last_loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the later steps there")
    options = parser.parse_args()
    set_seed(1)
    config = BertConfig(
        vocab_size=MASK + 1,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=LENGTH,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=3e-4,
            use_cpu=True,
            ddp_backend="gloo",
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = RecordingTrainer(BertForMaskedLM(config), arguments, train_dataset=Text())
        record = Record(options.trace)
        trainer.add_callback(RecordSteps(record, trainer))
        trainer.train()
        record.end(shown=trainer.is_world_process_zero())


if __name__ == "__main__":
    main()
