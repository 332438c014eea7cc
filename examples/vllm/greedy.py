"""Generates greedily with vLLM: the side of `prove.py` that has an environment of its own.

Reads {"model": FOLDER, "prompts": [[id, ...], ...], "new_tokens": N, "at_once": N, "tokens_a_step": N, "answers": FILE}
from stdin, and writes the new token ids of each prompt to the file; vLLM prints to stdout. All prompts are one batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    llm = LLM(
        asked["model"],
        dtype="float32",
        max_num_seqs=asked["at_once"],
        max_num_batched_tokens=asked["tokens_a_step"],
        enforce_eager=True,
        seed=0,
    )
    greedy = SamplingParams(temperature=0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], greedy)
    Path(asked["answers"]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
