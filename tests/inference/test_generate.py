"""Rows in a batch are as alone, prompts in chunks as at once, draws as transformers' rules say; text as it comes."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.decode import as_transformers
from benchmarks.peak_memory import fresh_processes, resident
from hybridtron.data.prepare.embedded import train_tokenizer
from hybridtron.inference.detokenize import Detokenizer, stream_texts
from hybridtron.inference.generate import Prompts, continue_prompts, generate
from hybridtron.inference.reader import reader, state_bytes
from hybridtron.inference.sampling import Sampling, allowed_scores, choose, uniform
from tests.conftest import SMALL_LAYERS, small_config, small_model
from tests.mixers.test_span_recipes import model_of
from tests.slow import slow_except

LENGTHS = (13, 1, 9, 21, 8)


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [torch.randint(61, (length,)).tolist() for length in lengths]


@torch.no_grad()
def read_all(model, prompts: list[list[int]], chunk: int = 1000) -> tuple[Tensor, dict]:
    return Prompts.of(prompts).read(reader(model).read, chunk)


def real_part(state: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """Return one row's state, without the padding among its keys and values."""
    parts = {name: part[row] for name, part in state.items()}
    if "length" in parts:
        parts |= {name: parts[name][len(parts[name]) - int(parts["length"]) :] for name in ("keys", "values")}
    return parts


@pytest.mark.parametrize("chunk", [1000, 8, 5, 1])
@pytest.mark.parametrize("pattern", ["M-W-F-", "S-W-S"])
def test_padding_and_chunks_do_not_change_logits_and_states(pattern: str, chunk: int) -> None:
    """Logits and states are equal for any row and chunk in which a prompt begins, also at a chunk's edge."""
    model = small_model(pattern, torch.float64)
    prompts = prompts_of()
    logits_BV, states = read_all(model, prompts, chunk)
    for row, prompt in enumerate(prompts):
        alone_V, alone = read_all(model, [prompt])
        torch.testing.assert_close(logits_BV[row], alone_V[0], rtol=1e-11, atol=1e-12)
        for layer, state in alone.items():
            expected = real_part(state, 0)
            batched = real_part(states[layer], row)
            for name, part in expected.items():
                torch.testing.assert_close(batched[name], part, rtol=1e-11, atol=1e-12, msg=f"{layer} {name}")


def test_tokens_of_padding_change_no_bit() -> None:
    model = small_model("M-W-S-F-")
    prompts = Prompts.of(prompts_of())
    other = Prompts(prompts.tokens_BL.clone(), prompts.starts_B)
    other.tokens_BL[torch.arange(21) < other.starts_B[:, None]] = 7
    with torch.no_grad():
        first, again = (batch.read(reader(model).read, 8)[0] for batch in (prompts, other))
    assert torch.equal(first, again)


SAMPLINGS = [Sampling(), Sampling(1.0, seed=3), Sampling(1.3, top_k=9, top_p=0.8, seed=4)]


@pytest.mark.parametrize("sampling", slow_except(SAMPLINGS, SAMPLINGS[-1]))
def test_rows_of_a_batch_are_generated_as_alone(sampling: Sampling) -> None:
    model = small_model("M-W-F-")
    prompts = prompts_of()
    together = list(islice(continue_prompts(reader(model), Prompts.of(prompts), sampling, chunk=6), 12))
    for row, prompt in enumerate(prompts):
        alone = list(islice(continue_prompts(reader(model), Prompts.of([prompt]), sampling, rows=[row]), 12))
        assert [step[row] for step in together] == [token for (token,) in alone]


def test_greedy_tokens_equal_those_of_transformers() -> None:
    """Compare with transformers' class for our models, padded on the left by its rules."""
    model = small_model("M-W-F-", torch.float64)
    prompts = prompts_of()
    theirs = as_transformers(model, small_config("M-W-F-"))
    padded = Prompts.of(prompts)
    mask_BL = (torch.arange(21) >= padded.starts_B[:, None]).long()
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 15}
    expected = theirs.generate(padded.tokens_BL, attention_mask=mask_BL, **settings)[:, 21:]
    generated = list(islice(continue_prompts(reader(model), padded, chunk=4), 15))
    assert torch.tensor(generated).T.equal(expected)


def test_rows_of_a_padded_batch_read_span_attention_as_alone() -> None:
    model = model_of("samba_span_laptop")
    prompts = prompts_of((200, 70))
    together = list(islice(continue_prompts(reader(model), Prompts.of(prompts), chunk=50), 8))
    for row, prompt in enumerate(prompts):
        assert [s[row] for s in together] == generate(model, torch.tensor([prompt]), 8, 0, 0)[0].tolist()


def test_memory_of_states_does_not_grow_with_the_length() -> None:
    """Count by hand, in fp32, for one row: a window of 8 keeps 7 keys and values in 2 heads of 8, and a number."""
    model = small_model("M-W-")
    state = SMALL_LAYERS["M"]["state"]
    inner = 64
    by_hand = 4 * inner * (state + 3) + 4 * 7 * 2 * 8 * 2 + 8
    for length in (3, 100, 500):
        assert state_bytes(read_all(model, prompts_of((length,)), 50)[1]) == by_hand
    steps = islice(continue_prompts(reader(model), Prompts.of(prompts_of((5,)))), 30)
    assert len(list(steps)) == 30


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="token"):
        Prompts.of([[1], []])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (5, 0.5), (1, 0.9), (100, 0.01)])
def test_top_k_and_top_p_keep_the_tokens_that_transformers_keeps(top_k: int, top_p: float) -> None:
    from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

    scores_BV = torch.randn(6, 40, dtype=torch.float64)
    expected = scores_BV
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(allowed_scores(scores_BV, Sampling(1.0, top_k, top_p)), expected)


def test_draws_follow_the_probabilities() -> None:
    logits_BV = torch.tensor([[0.1, 0.6, 0.0, 0.3]]).log().expand(4000, 4)
    drawn = choose(logits_BV, Sampling(1.0, seed=1), range(4000), 0)
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert shares.tolist() == pytest.approx([0.1, 0.6, 0.0, 0.3], abs=0.03)
    colder = choose(logits_BV, Sampling(0.5, seed=1), range(4000), 0)
    assert torch.bincount(colder, minlength=4)[1] / 4000 == pytest.approx(0.36 / 0.46, abs=0.03)


def test_random_numbers_are_uniform_and_depend_on_row_and_token() -> None:
    numbers = [uniform(7, row, token) for row in range(50) for token in range(50)]
    assert len(set(numbers)) == 2500
    assert 0 <= min(numbers) < 0.002
    assert 0.998 < max(numbers) < 1
    assert uniform(7, 3, 4) != uniform(8, 3, 4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the cat sat on the mat. Größe naïve 猫 " * 20], 300)


def written(
    tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...] = (), most: int = 1000
) -> tuple[list, Detokenizer]:
    text = Detokenizer(tokenizer.decode, most, before=ids[:1], stops=stops, ends=[0])
    parts = []
    stream_texts([text], iter([[token] for token in [*ids[1:], 0]]), lambda row, new: parts.append(new))
    return parts, text


TEXTS = ["the cat sat on the mat.", "Größe: 猫猫 naïve ☃ and on", "a\n\nb\n c"]


@pytest.mark.parametrize("text", TEXTS)
def test_parts_of_a_text_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    parts, row = written(tokenizer, ids)
    assert tokenizer.decode(ids[:1]) + "".join(parts) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    assert (row.ended, row.tokens, row.text) == ("end", ids[1:], "".join(parts))


@pytest.mark.parametrize("stop", ["cat s", "at.", "t on the m", "he mat.", "sat on", "."])
def test_stop_string_ends_the_text_wherever_tokens_divide_it(tokenizer: Tokenizer, stop: str) -> None:
    text = "the cat sat on the mat. the cat sat on the mat."
    for pieces in (tokenizer.encode(text).ids, [tokenizer.encode(letter).ids[0] for letter in text]):
        parts, row = written(tokenizer, pieces, ("never", stop))
        shown = tokenizer.decode(pieces[:1]) + "".join(parts)
        assert shown == text[: text.index(stop)]
        assert row.ended == "stop"


def test_text_that_begins_like_a_stop_string_is_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x").ids + tokenizer.encode("mat. the ma").ids
    parts, row = written(tokenizer, ids, ("mate", "mat. the mat"))
    assert "".join(parts) == "mat. the ma"
    assert row.ended == "end"


def test_first_of_two_stop_strings_ends_the_text(tokenizer: Tokenizer) -> None:
    letters = [tokenizer.encode(letter).ids[0] for letter in "xabcd"]
    assert written(tokenizer, letters, ("cd", "bc"))[1].text == "a"


def test_text_may_end_within_a_character(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode("a").ids[0], *(tokenizer.encode("☃").ids)]
    assert len(ids) > 3
    _, row = written(tokenizer, ids, most=len(ids) - 2)
    assert row.ended == "most"
    assert row.text == "\N{REPLACEMENT CHARACTER}"


def test_tokens_decoded_one_by_one_equal_the_whole_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(20):
        letters = ["a", *(rng.choice("abc ß猫☃é\n") for _ in range(30))]
        parts, _ = written(tokenizer, [token for letter in letters for token in tokenizer.encode(letter).ids])
        assert "a" + "".join(parts) == "".join(letters)


def peak_of_reading(length: int) -> int:
    """Bytes that a prompt of this length adds to a process, its tokens included."""
    torch.set_num_threads(1)
    model = small_model("M-W-")
    read_all(model, [[1] * 2048], 1024)  # what is loaded and built once
    tokens_BL = torch.randint(61, (1, length))
    before = resident(reset=True)
    with torch.no_grad():
        Prompts(tokens_BL, torch.zeros(1, dtype=torch.int64)).read(reader(model).read, 1024)
    return resident(reset=False) - before


@pytest.mark.slow
def test_long_prompt_takes_the_memory_of_a_chunk() -> None:
    """A passkey's row of 256k tokens as one of 4k, to a few MiB; all activations of it at once would take 200 MiB."""
    with fresh_processes() as pool:
        short = pool.submit(peak_of_reading, 2**12).result()
    with fresh_processes() as pool:
        long = pool.submit(peak_of_reading, 2**18).result()
    assert long <= short + 2**23
