"""Generate tokens with a Llama of random weights that vLLM splits over two workers of one machine.

    python generate.py --tensor-parallel 2 --steps 40

Losses are minus the log probabilities of the tokens that were chosen. --shard N runs the work of
one of N workers alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

from transformers import LlamaConfig
from vllm import LLM, SamplingParams

SEQUENCES = 4
PROMPT = 16


def config(shard: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=768,
        num_hidden_layers=6,
        num_attention_heads=12 // shard,
        num_key_value_heads=12 // shard,
        head_dim=64,
        intermediate_size=2048 // shard,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tensor-parallel", type=int, default=2, metavar="N")
    parser.add_argument("--shard", type=int, default=1, metavar="N")
    options = parser.parse_args()
    prompts = [
        {"prompt_token_ids": [(7 * row + column) % 2048 for column in range(PROMPT)]}
        for row in range(SEQUENCES)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=options.steps, ignore_eos=True, logprobs=0, detokenize=False
    )
    with tempfile.TemporaryDirectory() as folder:
        config(options.shard).save_pretrained(folder)
        model = LLM(
            folder,
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=options.tensor_parallel,
            distributed_executor_backend="mp",
            enforce_eager=True,
            max_model_len=256,
            seed=1,
        )
        model.generate(prompts, sampling, use_tqdm=False)
        begin = time.perf_counter()
        found = model.generate(prompts, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - begin
    tokens = [token for each in found for token in each.outputs[0].logprobs]
    losses = [-next(iter(token.values())).logprob for token in tokens]
    print(json.dumps({"losses": losses, "step_s": [elapsed / options.steps]}), flush=True)


if __name__ == "__main__":
    main()
