"""Generate text from a checkpoint, with the tokenizer stored in it.

    hybridtron generate runs/laptop --prompt "def main(" --tokens 200
    hybridtron generate runs/laptop --prompt "import " --prompt "class " --temperature 0 --stop "\\n\\n"
    hybridtron generate runs/laptop/checkpoints/step-00000245 --prompt-file book.txt --top-k 40 --top-p 0.9
    torchrun --nproc-per-node 2 -m hybridtron generate runs/samba parallel.tensor=2 --prompt "The"
    hybridtron generate runs/tuned --chat                           a conversation: each line of stdin gets an answer

For a run's folder, the newest checkpoint is used. Without a prompt, the text begins with the start of a document. The
text ends where the document ends, before a stop string, or after --tokens new tokens. A single text is printed while it
is generated; several texts are printed when all have ended. A prompt is read in several forward passes, each over a
chunk of tokens. After the prompt, every token takes the same time unless the model has full attention.

With --chat, each prompt is a user's message. It is formatted by the model's chat template, and the model's answer is
printed. With --chat and without a prompt, the lines from standard input are the user's messages of one conversation.

Exit codes: 0 text was generated, 2 there is no usable checkpoint or an argument is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hybridtron.cli.arguments import newest_checkpoint, positive
from hybridtron.config.pipeline_layout import launched
from hybridtron.evaluate.loaded_model import layout, load_model
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser, Unusable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hybridtron.config.schema import ParallelConfig
    from hybridtron.evaluate.chat import Chat
    from hybridtron.evaluate.loaded_model import LoadedModel
    from hybridtron.inference.detokenize import Detokenizer

DOCUMENT_STARTS = ("<|endoftext|>", "<|begin_of_text|>", "<s>", "<|end_of_text|>", "</s>", "<bos>", "<eos>", "[BOS]")
MAX_PROMPT_BYTES = 2**30  # maximum size of a --prompt-file


class ToContinue(NamedTuple):
    """A batch of prompts to continue.

    prompts: each prompt's token ids
    shown: for each prompt, the text printed in front of its continuation
    ends: token ids that end a continuation; None entries are ignored
    stops: strings that end a continuation
    """

    prompts: list[list[int]]
    shown: list[str]
    ends: list[int | None]
    stops: list[str]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Wrong values end the process with exit code 2."""
    parser = CommandParser(
        prog="hybridtron generate", description="Generate text from a checkpoint, or from a run's newest checkpoint."
    )
    add = parser.add_argument
    add("path", type=path_of, help="runs/NAME, or runs/NAME/checkpoints/step-00000100")
    add("layout", nargs="*", metavar="parallel.KEY=N", help="KEY: tensor, pipeline or context; with torchrun")
    add("--prompt", action="append", metavar="TEXT", help="a text to continue; several prompts form a batch")
    add("--prompt-file", action="append", type=path_of, metavar="FILE", help="a file whose text is a prompt")
    add("--tokens", type=positive, default=100, metavar="N", help="maximum new tokens (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the likeliest token (default: %(default)s)",
    )
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0: from all (default)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens of total probability P (default: 1)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the generated text before TEXT; may be repeated",
    )
    add("--past-end", action="store_true", help="continue where a document ends")
    add(
        "--chat",
        action="store_true",
        help="answer each --prompt as a user's message; without --prompt, each line of stdin",
    )
    add("--system", metavar="TEXT", help="with --chat: the system message")
    add("--seed", type=int, default=0, metavar="S", help="seed of the random draws (default: %(default)s)")
    add("--ema", action="store_true", help="use the moving average of the weights, which run.ema keeps")
    add("--chunk", type=positive, metavar="N", help="prompt tokens in a forward pass")
    chosen = parser.parse_intermixed_args(arguments)
    wrong = [
        (not (math.isfinite(chosen.temperature) and chosen.temperature >= 0), "temperature", "0 (greedy) or above"),
        (not 0 <= chosen.seed < 2**63, "seed", "0 or above, and below 2^63"),
        (chosen.top_k < 0, "top_k", "0 (all tokens) or above"),
        (not 0 < chosen.top_p <= 1, "top_p", "above 0, and at most 1 (all tokens)"),
        ("" in chosen.stop, "stop", "a non-empty text"),
    ]
    for is_wrong, name, cure in wrong:
        if is_wrong:
            option = f"--{name.replace('_', '-')}"
            parser.refuse(option, "out-of-range", f"{option} is {getattr(chosen, name)!r}, must be {cure}")
    if chosen.system is not None and not chosen.chat:
        parser.refuse("--system", "misplaced", "--system is only for --chat: add --chat, or leave --system out")
    if chosen.chat and chosen.past_end:
        parser.refuse("--past-end", "conflict", "--past-end can't be combined with --chat: leave --past-end out")
    return chosen


def main(arguments: list[str]) -> int:
    """Print each prompt with its continuation, or the answers if --chat is set. Returns the exit code."""
    chosen = parse(arguments)
    parallel = layout(chosen.layout)
    checkpoint = newest_checkpoint(chosen.path)
    texts = [*(chosen.prompt or []), *map(prompt_file, chosen.prompt_file or [])]
    if chosen.chat:
        return chat(checkpoint, parallel, texts, chosen)
    with load_model(checkpoint, parallel, averaged=chosen.ema) as model:
        print_texts(model, texts or [""], chosen)
    return 0


def chat(checkpoint: Path, parallel: ParallelConfig, texts: list[str], chosen: argparse.Namespace) -> int:
    """Answer each message in `texts`. Without messages, answer the lines from standard input as one conversation.

    Returns the exit code.
    """
    from hybridtron.evaluate.chat import Chat, assistant, user

    template = Chat.of(checkpoint)
    if chosen.system is None:
        before = []
    else:
        before = [{"role": "system", "content": chosen.system}]
    if not texts and launched().world_size > 1:
        raise Unusable(
            "--chat reads standard input only in a single process: with torchrun, give the messages as --prompt",
            code="unsupported",
        )
    conversations = [[*before, user(text)] for text in texts]
    prompts, ends, stops = _checked(template, conversations or [[*before, user("a question")]])
    with load_model(checkpoint, parallel, averaged=chosen.ema) as model:
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
    """Return (prompt tokens of each conversation, end tokens of an answer, stop strings of an answer).

    Raises Unusable if the chat template fails.
    """
    ends, stops = template.ends(conversations[0])
    return [template.prompt(messages) for messages in conversations], ends, stops


def _lines() -> Iterator[str]:
    """Yield the non-empty lines from standard input. On a terminal, `> ` is printed before each line is read."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        if text := line.strip():
            yield text


def print_texts(model: LoadedModel, texts: list[str], chosen: argparse.Namespace) -> None:
    """Continue the prompts as plain text, and print each prompt with its continuation."""
    decode = model.tokenizer.decode
    prompts = [prompt_tokens(model, text) for text in texts]
    ends = [] if chosen.past_end else [model.end]
    print_continued(model, ToContinue(prompts, [decode(ids) for ids in prompts], ends, []), chosen)


def print_continued(model: LoadedModel, request: ToContinue, chosen: argparse.Namespace) -> list[Detokenizer]:
    """Continue all prompts as one batch and print the texts. Only the first process prints.

    Returns a Detokenizer for each prompt. The continuation is in the Detokenizer's `text`.
    """
    from hybridtron.device import compute_device
    from hybridtron.inference.detokenize import Detokenizer, stream_texts
    from hybridtron.inference.generate import Prompts, continue_prompts
    from hybridtron.inference.sampling import Sampling

    decode = model.tokenizer.decode
    for ids in request.prompts:
        require_embeddings(model, ids)
    stops = [*chosen.stop, *request.stops]
    rows = [Detokenizer(decode, chosen.tokens, ids, stops, request.ends) for ids in request.prompts]
    sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed)
    steps = continue_prompts(model.read, Prompts.of(request.prompts, compute_device()), sampling, chunk=chosen.chunk)
    shown = sys.stdout if model.first and len(rows) == 1 else None
    print(request.shown[0], end="", flush=True, file=shown) if shown else None
    stream_texts(rows, steps, lambda _, new: print(new, end="", flush=True, file=shown) if shown else None)
    if shown:
        print()
    elif model.first:
        for number, (before, row) in enumerate(zip(request.shown, rows, strict=True), start=1):
            print(f"--- {number} of {len(rows)}\n{before}{row.text}")
    return rows


def prompt_tokens(model: LoadedModel, prompt: str) -> list[int]:
    """Tokenize a prompt. An empty prompt becomes the token that starts a document."""
    return model.tokenizer.encode(prompt_or_start(model.folder, model.tokenizer, prompt)).ids


def require_embeddings(model: LoadedModel, ids: list[int]) -> None:
    """Raise Unusable if a token id is beyond the model's vocabulary."""
    if (largest := max(ids)) >= (size := model.config.model.vocab_size):
        fault = f"tokenizer.json gives token id {largest}, but model.vocab_size={size}"
        raise Unusable(f"{model.folder}: {fault}: the tokenizer does not belong to the model", code="mismatch")


def prompt_or_start(checkpoint: Path, tokenizer: Tokenizer, prompt: str) -> str:
    """Return the prompt, or the name of the token that starts a document if the prompt is empty.

    Raises Unusable if the vocabulary has no such token, or if a non-empty prompt gives no tokens.
    """
    if prompt:
        if not tokenizer.encode(prompt).ids:
            raise Unusable(f"--prompt {prompt!r} gives no tokens with {checkpoint / 'tokenizer.json'}", code="missing")
        return prompt
    for name in DOCUMENT_STARTS:
        if tokenizer.token_to_id(name) is not None:
            return name
    looked_for = f"(such as {', '.join(DOCUMENT_STARTS)})"
    raise Unusable(
        f"{checkpoint / 'tokenizer.json'} has no token that starts a document {looked_for}: give a --prompt",
        code="missing",
    )


def prompt_file(path: Path) -> str:
    """Read a prompt from a UTF-8 file. Raises Unusable if the file can't be read or is empty."""
    from hybridtron.safe_open import Unreadable, read_regular

    try:
        text = read_regular(path, MAX_PROMPT_BYTES).decode("utf-8")
    except (OSError, Unreadable, UnicodeDecodeError) as error:
        raise Unusable(f"--prompt-file {path} can't be read: {error}", code="unreadable") from error
    if not text:
        raise Unusable(f"--prompt-file {path} is empty", code="missing")
    return text
