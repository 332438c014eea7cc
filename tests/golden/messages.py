"""Messages of the commands: each golden file has commands with wrong inputs, and the output of each.

Other tests compare keys and codes, so that a reworded message changes these files alone. A case is added as a line
`$ hybridtron COMMAND ...`, and `python -m tests.golden.messages` runs all of them and writes their outputs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from hybridtron import __version__
from hybridtron.cli.main import main
from tests.golden.prepare_inputs import PREPARE_FILES

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
COMMAND = re.compile(r"^\$ hybridtron ((?:.*\\\n)*.*)$", re.MULTILINE)
FILES: Mapping[str, bytes] = {
    "empty.yaml": b"# nothing\n",
    "list.yaml": b"- 1\n",
    "torn.yaml": b"model: {width: 1\n",
    "bytes.yaml": b"\xff\xfe\x00",
    "wrong_key.yaml": b"model: {widht: 1}\n",
    "unknown_base.yaml": b"defaults: [/recipe/no_such]\n",
    "nameless.yaml": b"model: {pattern: M, layers: {M: {kind: mamba}}}\nphases: [{seq_len: 8}]\n",
    "configs/recipe/no_package.yaml": b"model: {width: 96}\n",
    "export/config.json": b'{"model_type": "hybridtron"}',
    "export/hybridtron_export.json": b"{}",
    "transformers/config.json": b"{}",
    "started/checkpoints/step-00000001/manifest.json": b"",
    "fresh/config.yaml": b"",
    "tokenizer/tokenizer.json": b"{}",
    "squad.json": b'{"data": []}',
    "words.txt": b"apple\nbread\n",
    "short_words/a.txt": b"Too short.",
    "llama/config.json": b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 80, '
    b'"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56, "rms_norm_eps": 1e-5}',
    "wrong_values/config.json": b'{"architectures": "Llama", "hidden_size": "32", "rms_norm_eps": -1}',
    "unknown_class/config.json": b'{"architectures": ["GPT2LMHeadModel"]}',
    "dynamic_rope/config.json": b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 80, '
    b'"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56, "rms_norm_eps": 1e-5, '
    b'"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}',
    "quantized/config.json": b'{"quantization_config": {"quant_method": "awq"}}',
    "no_object/config.json": b"[]",
    "torn/config.json": b"{",
    "adapter/adapter_config.json": b'{"peft_type": "IA3"}',
    "bin/sbatch": b"#!/bin/sh\n",
    "bin/sinfo": b"#!/bin/sh\nprintf 'gpu*|up|12:00:00|4\\nlong|up|7-00:00:00|2\\nold|down|infinite|9\\n'\n",
    "bin/squeue": b"#!/bin/sh\n",
    "sweeps/list.yaml": b"[1, 2]",
    "sweeps/unknown_key.yaml": b"sttings: [a=1]",
    "sweeps/text.yaml": b"settings: recipe=laptop",
    "sweeps/no_value.yaml": b"settings: [laptop]",
    "sweeps/folder.yaml": b"settings: [run.dir=x]",
    "sweeps/unknown_start.yaml": b"variants: {b: {from: a}}",
    "sweeps/unknown_entry.yaml": b"variants: {a: {form: b}}",
    "sweeps/one_value.yaml": b"grid: {run.seed: 3}",
    "sweeps/no_values.yaml": b"grid: {run.seed: []}",
    "sweeps/twice.yaml": b"grid: {run.seed: [1, 1]}",
    "sweeps/metrics.yaml": b"metrics: loss",
    "sweeps/torn.yaml": b"settings: [a=1",
    "sweeps/same_name.yaml": b"variants: {'a b': [], 'a/b': []}",
    "sweeps/wrong_run.yaml": b"settings: [recipe=laptop, optim.clp=1]",
    "sweeps/good.yaml": b"settings: [recipe=laptop]\nvariants: {base: [], longer: {from: base}}",
    **PREPARE_FILES,
}
"""Files in the folder where the commands run; those in bin/ stand in for SLURM's programs."""


def renewed(text: str, work: Path) -> str:
    """Run the commands of a golden file in a folder, and return the file with their outputs."""
    for name, content in FILES.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(content)
        if name.startswith("bin/"):
            (work / name).chmod(0o755)
    matches = list(COMMAND.finditer(text))
    return "\n".join(f"{match[0]}\n{_output(_words(match[1]), work)}" for match in matches)


def _words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def _output(arguments: list[str], work: Path) -> str:
    """Return what a command prints and its exit code. Of argparse's usage and message, only the message is kept."""
    printed = io.StringIO()
    path = f"{work}/bin:{os.environ['PATH']}"
    with (
        contextlib.chdir(work),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.dict(os.environ, PATH=path),
    ):
        try:
            code: object = main(arguments)
            text = printed.getvalue()
        except SystemExit as end:
            code = end.code
            text = printed.getvalue().strip().rpartition("\n")[2] + "\n"
    for varying, mask in ((str(work), "WORK"), (str(ROOT), "ROOT"), (__version__, "VERSION")):
        text = text.replace(varying, mask)
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join([*lines, f"[exit code {code}]", ""])


def renew_all() -> None:
    """Write every golden file with the outputs as they are now."""
    for path in sorted(FOLDER.glob("*.txt")):
        with tempfile.TemporaryDirectory() as work:
            path.write_text(renewed(path.read_text(), Path(work).resolve()))


if __name__ == "__main__":
    renew_all()
