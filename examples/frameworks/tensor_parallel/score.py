"""Score text token by token with a Llama of random weights that tp_plan="auto" splits over ranks.
transformers takes gloo for CPUs.

    PYTHONPATH=.. torchrun --standalone --nproc-per-node 2 score.py --steps 60

--shard N runs the work of one of N ranks alone, without communication.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed

from record import Record
from stdlib_text import stdlib_text

SEQUENCES = 8


def config(shard: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=768,
        num_hidden_layers=6,
        num_attention_heads=12 // shard,
        num_key_value_heads=12 // shard,
        head_dim=64,
        intermediate_size=2048 // shard,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def text(steps: int) -> torch.Tensor:
    """Bytes of the standard library, a sequence in each row."""
    return stdlib_text(SEQUENCES * (steps + 1)).view(SEQUENCES, -1).long()


def load(shard: int) -> torch.nn.Module:
    """Each rank writes the same weights and reads its part, as of a checkpoint."""
    set_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config(shard)).save_pretrained(folder)
        plan = {"tp_plan": "auto"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plan).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shard", type=int, default=1, metavar="N")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the later steps there")
    options = parser.parse_args()
    model, tokens = load(options.shard), text(options.steps)
    record, cache = Record(options.trace), None
    with torch.no_grad():
        for step in range(options.steps):
            found = model(tokens[:, step : step + 1], past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            record.step(functional.cross_entropy(found.logits[:, -1], tokens[:, step + 1]).item())
    record.end(shown=int(os.environ.get("RANK", "0")) == 0)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
