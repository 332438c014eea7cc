"""Runs lm-evaluation-harness (`lm_eval`, "the harness") on a checkpoint's model, without exporting the model first.

The model may be divided over ranks in any parallel layout. The harness defines tasks, prompts and metrics. Texts are
encoded as in the harness's model class `hf`: the tokenizer adds its special tokens, and an empty context becomes an
end-of-text token. Chats are formatted by the template that the model was trained with.

A request longer than `max_length` tokens loses its beginning; such requests are counted and reported. All ranks get all
requests, and each model replica answers some batches. Every result is recorded, so that a killed evaluation can
continue.

Legend: B rows, T tokens, L = T - 1 labels, C labels per chunk, D width of the residual stream.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.device import compute_device
from hybridtron.evaluate.answers import everyone
from hybridtron.evaluate.harness_tasks import OWN_TASKS, HarnessTask
from hybridtron.evaluate.length import fitting_chunk, label_losses, of_labels
from hybridtron.evaluate.loaded_model import LoadedModel
from hybridtron.evaluate.sample_log import SampleLog
from hybridtron.inference.detokenize import Detokenizer, stream_texts
from hybridtron.inference.generate import Prompts, continue_prompts
from hybridtron.inference.sampling import GREEDY, Sampling
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.vocabulary import likeliest
from hybridtron.problems import Unusable, did_you_mean

VERSION = lm_eval.__version__
SEEDS = (0, 1234)  # the harness's default seeds: first for Python; second for numpy and the examples in prompts
RESAMPLED = 1000  # bootstrap samples, for the standard errors of metrics that are not means
Moved = Callable[[int, int], object]
Loaded = dict[str, Any]
Scored = tuple[Sequence[int], int]  # tokens of a row, and how many of its last tokens to score
Score = tuple[float, bool]  # sum of the scored tokens' log-probabilities; True if each is the likeliest token


@dataclass(frozen=True)
class Request:
    """A text to score or a prompt to continue.

    tokens: the text or the prompt
    scored: how many of the last tokens to score; 0 for a prompt
    most: how many tokens to generate at most
    stops: texts at which generation stops
    sampling: greedy, or temperature, top-k and top-p for sampled generation
    """

    tokens: tuple[int, ...]
    scored: int = 0
    most: int = 0
    stops: tuple[str, ...] = ()
    sampling: Sampling = GREEDY


class HarnessModel(TemplateLM):
    """A checkpoint's model with the interface that the harness calls.

    cut: how many requests lost their beginning, because they were too long
    without_system: how many chats lost their system prompt, because the chat template accepts no system prompts
    """

    def __init__(
        self, model: LoadedModel, records: SampleLog, batch: int, max_length: int, chat: ChatTemplate | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.records = records
        self.batch = batch
        self.max_length = max_length
        self.chat = chat
        self.moved: Moved = lambda done, of: None
        self.cut = self.without_system = 0

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token. Raises Unusable if the checkpoint names no such token."""
        if self.model.end is None:
            raise Unusable(
                f"{self.model.folder} names no end-of-text token, which the harness needs before the first token",
                code="missing",
            )
        return self.model.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text's first token: the chat template's BOS, or without a BOS the end-of-text token."""
        if self.chat is None:
            name = ""
        else:
            name = dict(self.chat.tokens).get("bos_token", "")
        bos = self.model.tokenizer.token_to_id(name)
        if bos is None:
            return self.eot_token_id
        return bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.folder)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a chat as text.

        If the template does not accept system messages, they are removed, and `without_system` counts the chat.
        """
        assert self.chat is not None  # `chat_template` in harness_run.py has checked this
        try:
            return self.chat.prompt(chat_history, continued=not add_generation_prompt)
        except ValueError as error:
            other_messages = [message for message in chat_history if message["role"] != "system"]
            if len(other_messages) == len(chat_history):
                raise Unusable(f"{self.model.folder}: {error}", code="unreadable") from error
            self.without_system += 1
            return self.apply_chat_template(other_messages, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Encode a text.

        By default the tokenizer adds its special tokens, unless the text already begins with the prefix token.
        """
        if add_special_tokens is None:
            beginning = self.model.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not (beginning and string.startswith(beginning))
        return self.model.tokenizer.encode(string, add_special_tokens=add_special_tokens).ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return self._scored([(context + continuation, len(continuation)) for _, context, continuation in requests])

    def _scored(self, rows: Sequence[tuple[list[int], int]]) -> list[Score]:
        """Return each row's score: the last tokens' log-likelihood, and True if each is the likeliest token."""
        requests = [Request(self._kept(tokens, self.max_length + 1), scored) for tokens, scored in rows]
        return [(value, bool(greedy)) for value, greedy in self._results(requests)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        windows = [list(self._windows(*request.args)) for request in requests]
        scores = iter(self._scored([window for windows_of_text in windows for window in windows_of_text]))
        return [sum(next(scores)[0] for _ in windows_of_text) for windows_of_text in windows]

    def _windows(self, text: str) -> Iterator[tuple[list[int], int]]:
        """Split a text into windows of at most `max_length` scored tokens; each token is scored in one window.

        Yields a window's tokens, and how many of its last tokens to score. The first window begins with the prefix
        token. Each later window begins with context from the window before it.
        """
        tokens = self.tok_encode(text)
        for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
            context, predicted = make_disjoint_window(pair)
            yield context + predicted, len(predicted)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        return self._results([self._wanted(*request.args) for request in requests])

    def _wanted(self, prompt: str, settings: dict[str, Any]) -> Request:
        """Build a generation request from a prompt and the harness's settings."""
        settings = dict(normalize_gen_kwargs(settings))
        is_sampled = settings["do_sample"]
        sampling = GREEDY
        if is_sampled:
            top_k, top_p = (settings.get(name) or default for name, default in (("top_k", 0), ("top_p", 1.0)))
            sampling = Sampling(settings["temperature"], int(top_k), float(top_p), SEEDS[1])
        most = settings["max_gen_toks"]
        if most >= self.max_length:
            raise Unusable(
                f"--max-length is {self.max_length}: raise it above {most}, the number of tokens that a task generates",
                code="out-of-range",
            )
        tokens = self._kept(self.tok_encode(prompt) or [self.prefix_token_id], self.max_length - most)
        return Request(tokens, 0, most, tuple(stop for stop in settings["until"] if stop), sampling)

    def _kept(self, tokens: list[int], most: int) -> tuple[int, ...]:
        """Return the last `most` tokens. If there are more, `cut` counts the request."""
        self.cut += len(tokens) > most
        return tuple(tokens[-most:])

    def _results(self, requests: Sequence[Request]) -> list[Any]:
        """Return the requests' results in order. First run the requests without a recorded result, and record them.

        A batch has requests with equal sampling settings. The longest requests come first, so that the process runs out
        of memory at the start or not at all.
        """
        keys = list(_keys(requests))
        missing = [index for index, key in enumerate(keys) if key not in self.records]
        missing.sort(key=lambda index: (repr(requests[index].sampling), -len(requests[index].tokens), index))
        done = 0
        turn_size = self.batch * self.model.replicas
        for _, alike in itertools.groupby(missing, lambda index: requests[index].sampling):
            group_indices = list(alike)
            for first in range(0, len(group_indices), turn_size):
                turn_indices = group_indices[first : first + turn_size]
                own_indices = turn_indices[self.model.replica * self.batch :][: self.batch]
                if own_indices:
                    results = self._read([requests[index] for index in own_indices], own_indices)
                else:
                    results = []
                lines = [
                    {"key": keys[i], "index": i, "result": result}
                    for i, result in zip(own_indices, results, strict=True)
                ]
                self.records.add(everyone(self.model, lines))
                self.moved(done := done + len(turn_indices), len(missing))
        return [self.records.lines[key]["result"] for key in keys]

    def _read(self, requests: Sequence[Request], rows: Sequence[int]) -> Sequence[Any]:
        """Score or generate one batch."""
        if requests[0].scored:
            return scored_rows(self.model, [(request.tokens, request.scored) for request in requests])
        decode = self.model.tokenizer.decode
        texts = [Detokenizer(decode, request.most, stops=request.stops, ends=[self.model.end]) for request in requests]
        prompts = Prompts.of([request.tokens for request in requests], compute_device())
        stream_texts(
            texts, continue_prompts(self.model.read, prompts, requests[0].sampling, rows), lambda row, new: None
        )
        return [text.text for text in texts]


@torch.no_grad()
def scored_rows(model: LoadedModel, rows: Sequence[Scored]) -> list[Score]:
    """Score the last tokens of each row. At least one token in a row must not be scored."""
    longest = max(len(tokens) for tokens, _ in rows)
    # rows are padded on the right, which does not change the predictions before the padding
    tokens_BT = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in rows])
    chunk = fitting_chunk(model.arch, len(tokens_BT), model.read.context.size)
    losses_LB, likeliest_LB = of_labels(model.read, tokens_BT, chunk, _loss_and_likeliest, (2,)).unbind(-1)
    ends = [(row, len(tokens) - 1, scored) for row, (tokens, scored) in enumerate(rows)]
    return [
        (-losses_LB[end - scored : end, row].sum().item(), bool(likeliest_LB[end - scored : end, row].all()))
        for row, end, scored in ends
    ]


def _loss_and_likeliest(labels_CB: Tensor, stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    """Return (C, B, 2): each label's negative log-probability, and 1 if the label is the likeliest token, else 0."""
    losses_CB = label_losses(labels_CB, stage, x_CBD)
    is_likeliest_CB = likeliest(x_CBD, stage.output_weight(), stage.slice.tensor) == labels_CB
    return torch.stack((losses_CB, is_likeliest_CB.to(losses_CB.dtype)), dim=-1)


def _keys(requests: Sequence[Request]) -> Iterator[str]:
    """Yield a key for each request: its digest, and a number that distinguishes equal requests."""
    counts: Counter[str] = Counter()
    for request in requests:
        digest = hashlib.blake2b(repr(request).encode(), digest_size=16).hexdigest()
        counts[digest] += 1
        yield f"{digest}/{counts[digest]}"


def known_tasks(wanted: Sequence[HarnessTask], include: Path | None) -> TaskManager:
    """Return the harness's task manager. Raises Unusable for an unknown task.

    Listing the harness's built-in tasks takes seconds, so they are listed only if a wanted task is found nowhere else.
    """
    if include is not None and not include.is_dir():
        raise Unusable(f"--include: the folder {include} does not exist", code="no-file")
    names = [task.name for task in wanted]
    manager = _manager(include, include_defaults=False)
    if any(name not in OWN_TASKS and name not in manager.all_tasks for name in names):
        manager = _manager(include, include_defaults=True)
    known = [*OWN_TASKS, *manager.all_tasks]
    if unknown := [name for name in names if name not in known]:
        cure = "`lm_eval ls tasks` lists the harness's tasks, and --include DIR adds task files of your own"
        raise Unusable(
            f"--harness: there is no task {unknown[0]!r}{did_you_mean(unknown[0], known)}; {cure}", code="unknown-name"
        )
    return manager


def _manager(include: Path | None, include_defaults: bool) -> TaskManager:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # no warnings about the harness's task files
    return TaskManager(include_path=None if include is None else str(include), include_defaults=include_defaults)


def load_task(task: HarnessTask, manager: TaskManager, run_code: bool) -> Loaded | str:
    """Load a task's documents and settings; return the loaded task, or the reason why it can't be loaded."""
    config = OWN_TASKS.get(task.name)
    task_config = config or manager.task_index[task.name].cfg or {}
    if task_config.get("unsafe_code") and not run_code:
        return "the task runs code that the model writes: pass --run-code to allow this, best on an isolated machine"
    if run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # required by the package `evaluate`, which runs the code
    try:
        loaded_tasks: Loaded = dict(manager.load([dict(config) if config else task.name]))
    except Exception as error:  # data sets, networks and a task's own code may raise anything
        path = task_config.get("dataset_path")
        reason = f"{error or type(error).__name__}".splitlines()[0]
        if path and path not in reason:
            return f"the task's data set {path} can't be loaded: {reason}"
        return reason
    for harness_task in loaded_tasks["tasks"].values():
        if task.shots is not None or harness_task.get_config("num_fewshot") is None:
            harness_task.set_config("num_fewshot", task.shots or 0)
        if task.generation:
            harness_task.set_config(
                "generation_kwargs", {**(harness_task.get_config("generation_kwargs") or {}), **task.generation}
            )
        harness_task.set_fewshot_seed(SEEDS[1])
    return loaded_tasks


def run_tasks(model: HarnessModel, tasks: Loaded, chat: bool, samples: int | None, run_code: bool) -> dict[str, Any]:
    """Run the harness on loaded tasks, and return the dict that the harness returns, with scores and samples.

    chat: format prompts as chats
    samples: largest number of documents for each task; None for all
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # compute standard errors without workers, since this process uses torch
    random.seed(SEEDS[0])
    np.random.seed(SEEDS[1])
    results = evaluate(
        model,
        tasks,
        limit=samples,
        bootstrap_iters=RESAMPLED,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        confirm_run_unsafe_code=run_code,
    )
    assert results is not None  # the harness returns None only on ranks above 0, and treats each of our ranks as rank 0
    return dict(results)
