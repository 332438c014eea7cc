"""Masks from folder to batch: in a masked toy a token shows whether it is learned, so every label shows its mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridtron.config.schema import Documents, Order
from hybridtron.data.batch import Batch
from hybridtron.data.folder import TokenFolder
from hybridtron.data.loader import Loader
from hybridtron.data.mixture_spec import reading_plan
from hybridtron.data.order.phase_order import PhaseOrder
from hybridtron.data.sources import Sources
from hybridtron.data.validation import held_out
from tests.data.conftest import EOS, LENGTHS, learned, sources_of
from tests.data.test_loader import joined, same

PLAIN = 5000  # from this token on they are of a folder without masks
MODES = list(itertools.product(Order, Documents))
lengths = st.lists(st.integers(1, 90), min_size=3, max_size=40).filter(lambda drawn: sum(drawn) > 40)


def check(batches: list[Batch]) -> None:
    """Check that a token counts if it is learned and belongs to the same document as the token before it."""
    whole = joined(batches)
    labels = whole["labels_BL"]
    tokens = whole["tokens_BL"]
    expected = torch.from_numpy(learned(labels.numpy())) | (labels >= PLAIN)
    if "documents_BL" in whole:
        expected &= tokens != EOS
    assert whole["mask_BL"].dtype == torch.bool
    assert torch.equal(whole["mask_BL"], expected)


def mixed(make_folder: Callable[..., TokenFolder], first: list[int], second: list[int], name: str = "") -> Sources:
    masked = make_folder(first, name=f"{name}masked", vocab=9999, masked=True)
    plain = make_folder(second, name=f"{name}plain", vocab=9999, first=PLAIN)
    return sources_of((masked, "text", 0.7), (plain, "text", 0.3))


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths, lengths, st.integers(0, 2**40), st.sampled_from(MODES), st.integers(0, 60), st.sampled_from([1, 2, 4]))
def test_rows_of_mixed_sources_learn_masked_tokens(
    make_folder: Callable[..., TokenFolder],
    tmp_path_factory: pytest.TempPathFactory,
    first: list[int],
    second: list[int],
    seed: int,
    mode: tuple[Order, Documents],
    start: int,
    ranks: int,
):
    """Packed and in lanes, whole or by ranks, from any step on as a resumed run reads it, over epoch boundaries."""
    sources = mixed(make_folder, first, second, tmp_path_factory.mktemp("toys").name)
    reading = PhaseOrder(*mode, 16, 8, 2, seed, 100)
    whole = Loader(sources, reading)
    parts = [list(Loader(sources, reading, rank=rank, ranks=ranks).iterate(start, start + 2)) for rank in range(ranks)]
    for step in range(2):
        check(expected := whole.micro_batches(start + step))
        assert same([batch for part in parts for batch in part[step]], expected)


@pytest.mark.parametrize("documents", Documents)
def test_chunks_of_a_lane_keep_their_masks(make_folder: Callable[..., TokenFolder], documents: Documents):
    sources = mixed(make_folder, list(LENGTHS), list(LENGTHS))
    reading = replace(PhaseOrder(Order.lanes, documents, 16, 8, 2, 7, 100), chunks=2)
    for step in range(3):
        batches = Loader(sources, reading).micro_batches(step)
        assert [batch.tokens_BL.shape for batch in batches] == [(2, 16)] * 4
        for batch in batches:
            check([batch])


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_held_out_rows_have_masks(make_folder: Callable[..., TokenFolder], compression: str | None):
    """Read documents whose shapes take one, two and four bytes. A shard fetched into the cache has its masks."""
    folder = make_folder(validation=(11, 254, 255, 70_000), vocab=80_000, masked=True, compression=compression)
    chosen = held_out(sources_of((folder, "text", 1)), Documents.isolate, 1000, 10**6, 4, 1000)
    batches = [batch.read() for batch in chosen]
    assert sum(len(batch.tokens_BL) for batch in batches) == 70
    for batch in batches:
        expected = torch.from_numpy(learned(batch.labels_BL.numpy())) & (batch.tokens_BL != EOS)
        assert torch.equal(batch.mask_BL, expected)


def test_the_plan_shows_the_learned_share(make_folder: Callable[..., TokenFolder]):
    """Count the 66 multiples of 3 and 12 eos among 200 tokens and 12 eos."""
    sources = mixed(make_folder, list(LENGTHS), list(LENGTHS))
    assert sources.masked
    masked, plain = reading_plan(sources.mixture, 1000)
    assert (masked.learned, masked.shown_learned) == (78 / 212, "36.8%")
    assert (plain.learned, plain.shown_learned) == (None, "all")
    assert not sources_of((make_folder(), "text", 1)).masked


def test_masks_change_the_fingerprint_of_the_tokens(make_folder: Callable[..., TokenFolder]):
    reading = PhaseOrder(Order.windows, Documents.isolate, 16, 8, 2, 7, 100)
    masked, plain = (
        Loader(sources_of((make_folder(name=name, masked=name == "masked"), "text", 1)), reading).fingerprint
        for name in ("masked", "plain")
    )
    assert {key for key in plain if plain[key] != masked[key]} == {"tokens"}
