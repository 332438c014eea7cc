"""Write an export as a GGUF file, which llama.cpp and programs based on llama.cpp load.

    hybridtron gguf mamba2-hf --output mamba2.gguf

The export's class must be Mamba, Mamba-2, Granite's hybrid or Falcon-H1. Its tokenizer must merge byte pairs, and
llama.cpp must be able to split texts in the same way. Matrices keep the export's dtype; `llama-quantize` makes smaller
files.

Exit codes: 0 done, 2 llama.cpp can't run the model, or the folder is not an export.
"""

from __future__ import annotations

from hybridtron.cli.arguments import not_there_yet
from hybridtron.config.units import readable
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser
from hybridtron.progress import progress_bar
from hybridtron.requirements import demand


def main(arguments: list[str]) -> int:
    """Write a GGUF file. Returns the exit code."""
    parser = CommandParser(prog="hybridtron gguf", description="Write an export as a GGUF file for llama.cpp.")
    parser.add_argument("export", type=path_of, help="a folder that hybridtron export has written")
    parser.add_argument("--output", type=path_of, required=True, metavar="FILE", help="the GGUF file")
    chosen = parser.parse_args(arguments)
    demand("gguf")
    from hybridtron.interop.gguf_file import write_gguf  # imports torch

    output = not_there_yet(chosen.output)
    with progress_bar("weights") as report_progress:
        vocabulary = write_gguf(chosen.export, output, report_progress)
    size = readable(output.stat().st_size)
    print(f"{output}: {size}B, {len(vocabulary.tokens)} tokens, pre-tokenizer {vocabulary.splits_by}")
    return 0
