"""Generate text from a checkpoint, with the tokenizer stored in it.

    hybridtron generate runs/laptop --prompt "def main(" --tokens 200
    hybridtron generate runs/laptop --prompt "import " --prompt "class " --temperature 0 --stop "\\n\\n"
    hybridtron generate runs/laptop/checkpoints/step-00000245 --prompt-file book.txt --top-k 40 --top-p 0.9
    torchrun --nproc-per-node 2 -m hybridtron generate runs/samba parallel.tensor=2 --prompt "The"
    hybridtron generate runs/tuned --chat                           a conversation: a line, an answer

A run's folder stands for its newest checkpoint. Without a prompt the text begins with the start of a document. It ends
with the document, before a stop string, or after --tokens. A single text is printed as it is generated, several texts
after all have ended. The prompt is read in chunks. After it, every token takes the same time unless the model has full
attention. With --chat, prompts are messages, formatted by the model's chat template, and the answers are printed.
Without a prompt, messages are read line by line from standard input, as one conversation.

Exit codes: 0 text was generated, 2 there is no usable checkpoint or an argument is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hybridtron.cli.given import newest_checkpoint, positive
from hybridtron.config.layout import launched
from hybridtron.evaluate.served import layout, served
from hybridtron.limits import path_of
from hybridtron.problems import Unusable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hybridtron.config.schema import ParallelConfig
    from hybridtron.evaluate.chat import Chat
    from hybridtron.evaluate.served import Served
    from hybridtron.model.text import TextOfRow

DOCUMENT_STARTS = ("<|endoftext|>", "<|begin_of_text|>", "<s>", "<|end_of_text|>", "</s>", "<bos>", "<eos>", "[BOS]")
LARGEST_PROMPT = 2**30  # bytes of a --prompt-file


class ToContinue(NamedTuple):
    """A batch of prompts to continue.

    prompts: token ids
    shown: text printed in front of each continuation
    ends, stops: token ids and strings that end a continuation
    """

    prompts: list[list[int]]
    shown: list[str]
    ends: list[int | None]
    stops: list[str]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="hybridtron generate", description="Text from a checkpoint, or from the newest one of a run's folder."
    )
    add = parser.add_argument
    add("path", type=path_of, help="runs/NAME, or runs/NAME/checkpoints/step-00000100")
    add("layout", nargs="*", metavar="parallel.KEY=N", help="tensor, pipeline, context: over the processes of torchrun")
    add("--prompt", action="append", metavar="TEXT", help="what to continue; several are read as one batch")
    add("--prompt-file", action="append", type=path_of, metavar="FILE", help="a prompt that is a file's text")
    add("--tokens", type=positive, default=100, metavar="N", help="new tokens, at most (default: %(default)s)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token (default: %(default)s)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0: from all (default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest with mass P (default: 1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--past-end", action="store_true", help="continue where a document ends")
    add(
        "--chat",
        action="store_true",
        help="answer messages by the model's chat template; without --prompt: line by line",
    )
    add("--system", metavar="TEXT", help="with --chat: the system's message, which comes first")
    add("--seed", type=int, default=0, metavar="S", help="another seed, another text")
    add("--chunk", type=positive, metavar="N", help="tokens of a prompt that are read at a time")
    chosen = parser.parse_intermixed_args(arguments)
    wrong = [
        (not (math.isfinite(chosen.temperature) and chosen.temperature >= 0), "temperature", "0 (greedy) or above"),
        (not 0 <= chosen.seed < 2**63, "seed", "0 or above, and below 2^63"),
        (chosen.top_k < 0, "top_k", "0 (all tokens) or above"),
        (not 0 < chosen.top_p <= 1, "top_p", "above 0, and at most 1 (all tokens)"),
        ("" in chosen.stop, "stop", "a text"),
    ]
    for is_wrong, name, cure in wrong:
        if is_wrong:
            parser.error(f"--{name.replace('_', '-')} is {getattr(chosen, name)!r}, must be {cure}")
    if chosen.system is not None and not chosen.chat:
        parser.error("--system belongs to --chat")
    if chosen.chat and chosen.past_end:
        parser.error("--past-end continues plain text where a document ends; leave it out with --chat")
    return chosen


def main(arguments: list[str]) -> int:
    """Print each prompt with its continuation, or answers with --chat. Returns the exit code."""
    chosen = parse(arguments)
    parallel = layout(chosen.layout)
    checkpoint = newest_checkpoint(chosen.path)
    texts = [*(chosen.prompt or []), *map(prompt_file, chosen.prompt_file or [])]
    if chosen.chat:
        return chat(checkpoint, parallel, texts, chosen)
    with served(checkpoint, parallel) as model:
        print_texts(model, texts or [""], chosen)
    return 0


def chat(checkpoint: Path, parallel: ParallelConfig, texts: list[str], chosen: argparse.Namespace) -> int:
    """Answer each message, or hold a conversation over standard input if there is none. Returns the exit code."""
    from hybridtron.evaluate.chat import Chat, assistant, user

    template = Chat.of(checkpoint)
    if chosen.system is None:
        before = []
    else:
        before = [{"role": "system", "content": chosen.system}]
    if not texts and launched().world_size > 1:
        raise Unusable(
            "--chat reads lines on one process: with several, name what to answer as --prompt", code="unsupported"
        )
    conversations = [[*before, user(text)] for text in texts]
    prompts, ends, stops = _checked(template, conversations or [[*before, user("a question")]])
    with served(checkpoint, parallel) as model:
        if conversations:
            print_continued(model, ToContinue(prompts, [""] * len(prompts), [model.end, *ends], stops), chosen)
            return 0
        conversation = before
        for line in _lines():
            messages = [*conversation, user(line)]
            try:
                (prompt,), ends, stops = _checked(template, [messages])
            except Unusable as error:  # skip this line and continue the conversation
                print(error, file=sys.stderr)
                continue
            request = ToContinue([prompt], [""], [model.end, *ends], stops)
            conversation = [*messages, assistant(print_continued(model, request, chosen)[0].text)]
    return 0


def _checked(template: Chat, conversations: list[list[dict[str, str]]]) -> tuple[list[list[int]], list[int], list[str]]:
    """Return each conversation's prompt tokens, and the token ids and strings that end an answer. Raises Unusable."""
    ends, stops = template.ends(conversations[0])
    return [template.prompt(messages) for messages in conversations], ends, stops


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty; a terminal shows `> ` before each."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        if text := line.strip():
            yield text


def print_texts(model: Served, texts: list[str], chosen: argparse.Namespace) -> None:
    """Continue the prompts as plain text, and print each prompt with its continuation."""
    decode = model.tokenizer.decode
    prompts = [prompt_tokens(model, text) for text in texts]
    ends = [] if chosen.past_end else [model.end]
    print_continued(model, ToContinue(prompts, [decode(ids) for ids in prompts], ends, []), chosen)


def print_continued(model: Served, wanted: ToContinue, chosen: argparse.Namespace) -> list[TextOfRow]:
    """Continue all prompts as one batch, print the texts and return them. Only the first process prints."""
    from hybridtron.device import compute_device
    from hybridtron.model.generate import Prompts, continued
    from hybridtron.model.sampling import Sampling
    from hybridtron.model.text import TextOfRow, write

    decode = model.tokenizer.decode
    for ids in wanted.prompts:
        require_embeddings(model, ids)
    stops = [*chosen.stop, *wanted.stops]
    rows = [TextOfRow(decode, chosen.tokens, ids, stops, wanted.ends) for ids in wanted.prompts]
    sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed)
    steps = continued(model.read, Prompts.of(wanted.prompts, compute_device()), sampling, chunk=chosen.chunk)
    shown = sys.stdout if model.first and len(rows) == 1 else None
    print(wanted.shown[0], end="", flush=True, file=shown) if shown else None
    write(rows, steps, lambda _, new: print(new, end="", flush=True, file=shown) if shown else None)
    if shown:
        print()
    elif model.first:
        for number, (before, row) in enumerate(zip(wanted.shown, rows, strict=True), start=1):
            print(f"--- {number} of {len(rows)}\n{before}{row.text}")
    return rows


def prompt_tokens(model: Served, prompt: str) -> list[int]:
    """Tokenize a prompt; an empty one becomes the token that starts a document."""
    return model.tokenizer.encode(prompt_or_start(model.folder, model.tokenizer, prompt)).ids


def require_embeddings(model: Served, ids: list[int]) -> None:
    """Raise Unusable if a token id is beyond the model's vocabulary."""
    if (largest := max(ids)) >= (size := model.config.model.vocab_size):
        fault = f"token {largest} of its tokenizer.json is beyond model.vocab_size={size}"
        raise Unusable(f"{model.folder}: {fault}: this tokenizer is not the model's", code="mismatch")


def prompt_or_start(checkpoint: Path, tokenizer: Tokenizer, prompt: str) -> str:
    """Return the prompt, or the vocabulary's document separator if the prompt is empty.

    Raises Unusable if the vocabulary has no such token, or if the prompt has no token.
    """
    if prompt:
        if not tokenizer.encode(prompt).ids:
            raise Unusable(
                f"--prompt {prompt!r} has no token in the vocabulary of {checkpoint / 'tokenizer.json'}", code="missing"
            )
        return prompt
    for name in DOCUMENT_STARTS:
        if tokenizer.token_to_id(name) is not None:
            return name
    looked_for = f"(looked for {', '.join(DOCUMENT_STARTS)})"
    raise Unusable(
        f"{checkpoint / 'tokenizer.json'} names no token that starts a document {looked_for}: use --prompt",
        code="missing",
    )


def prompt_file(path: Path) -> str:
    """Read a prompt from a UTF-8 file. Raises Unusable if it can't be read or is empty."""
    from hybridtron.regular_files import Unreadable, read_regular

    try:
        text = read_regular(path, LARGEST_PROMPT).decode("utf-8")
    except (OSError, Unreadable, UnicodeDecodeError) as error:
        raise Unusable(f"--prompt-file {path} can't be read: {error}", code="unreadable") from error
    if not text:
        raise Unusable(f"--prompt-file {path} is empty", code="missing")
    return text
