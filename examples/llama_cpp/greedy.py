"""Runs a GGUF file with llama-cpp-python: the side of `prove.py` that has an environment of its own.

Reads {"model": FILE, "texts": [...], "new_tokens": N} from stdin. Writes for each text its token ids, the logits after
it, and N greedy tokens.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np

asked = json.load(sys.stdin)
IN_FP32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # keys and values; fp16 by default
llama = llama_cpp.Llama(asked["model"], n_ctx=1024, n_batch=1024, n_ubatch=1024, n_threads=1, verbose=False, **IN_FP32)
vocab_size = llama.n_vocab()


def last_logits() -> np.ndarray:
    """Return the logits after the last token that was read."""
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (vocab_size,)).copy()


answers = []
for text in asked["texts"]:
    llama.reset()
    prompt = llama.tokenize(text.encode(), add_bos=True, special=False)
    llama.eval(prompt)
    logits = last_logits()
    tokens = [int(logits.argmax())]
    while len(tokens) < asked["new_tokens"]:
        llama.eval(tokens[-1:])
        tokens.append(int(last_logits().argmax()))
    answers.append({"prompt": prompt, "logits": logits.tolist(), "tokens": tokens})
json.dump(answers, sys.stdout)
