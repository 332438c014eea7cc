"""A linear recurrence over the tokens of a chunk, with a factor for every entry of the state:

    h_t = a_t h_{t-1} + u_t v_t        or, backwards,        h_t = a_t h_{t+1} + u_t v_t

No value crosses a document boundary (a cut), finite or not. There a_t is 0, which suffices for finite values. If the
state at the end is not finite, h is computed again without any addition across cuts.

Legend: T tokens, B rows, N state entries per channel, E channels; G groups of S tokens each, T = G S.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

GROUP = 8  # tokens in a group: these advance one after another, all groups of a chunk in parallel
LARGE_STATE = 2**15  # entries in all rows' states, from which on parallel groups gain nothing on a CPU


def recur(
    a_TBNE: Tensor,
    u_TB1E: Tensor,
    v_TBN1: Tensor,
    h_TBNE: Tensor,
    carry_BNE: Tensor,
    cut_TB: Tensor | None,
    back: bool = False,
) -> None:
    """Replace h, which holds u v on entry, by the states after all tokens.

    The carry is the state before the first token, or after the last one if `back`.
    """
    _recur(a_TBNE, h_TBNE, carry_BNE, None, back)
    if cut_TB is not None and not h_TBNE[0 if back else -1].sum().isfinite():  # inf and nan persist to the end
        torch.mul(u_TB1E, v_TBN1, out=h_TBNE)
        _recur(a_TBNE, h_TBNE, carry_BNE, cut_TB, back)


def _recur(a_TBNE: Tensor, h_TBNE: Tensor, carry_BNE: Tensor, cut_TB: Tensor | None, back: bool) -> None:
    """Run the recurrence once, in place, without additions across the cuts if `cut_TB` is given.

    Few large operations instead of one small one per token: groups of tokens advance in parallel, each from zero; then
    a state is passed from group to group; then every group adds the decayed state that it was passed.
    """
    one_by_one = h_TBNE.device.type == "cpu" and carry_BNE.numel() >= LARGE_STATE
    size = 1 if one_by_one or len(h_TBNE) % GROUP != 0 else GROUP
    direction = -1 if back else 1
    a = a_TBNE.unflatten(0, (-1, size))
    h = h_TBNE.unflatten(0, (-1, size))
    since_start = a if size == 1 else a.clone()  # product of the factors since the group's first token
    cut = None if cut_TB is None else cut_TB.unflatten(0, (-1, size))
    # a cut since then
    if cut is None:
        passed = None
    else:
        passed = (cut.flip(1).cumsum(1).flip(1) if back else cut.cumsum(1)) > 0
    order = range(size)[::direction]
    for before, now in itertools.pairwise(order):
        _add(h, a, (slice(None), now), h[:, before], cut)
        since_start[:, now].mul_(since_start[:, before])
    handed = []
    for group in range(len(h))[::direction]:
        handed.append(carry_BNE)
        carry_BNE = _add(h, since_start, (group, order[-1]), carry_BNE, passed)
    if size > 1:
        others = slice(1, None) if back else slice(None, -1)
        _add(h, since_start, (slice(None), others), torch.stack(handed[::direction]).unsqueeze(1), passed)


def _add(h: Tensor, factor: Tensor, place: tuple[int | slice, ...], before: Tensor, cut: Tensor | None) -> Tensor:
    """Add factor * before to h at a place, except across a cut; return that part of h."""
    if cut is None:
        return h[place].addcmul_(factor[place], before)
    mask = cut[place]
    kept = h[place][mask]
    h[place].addcmul_(factor[place], before)[mask] = kept
    return h[place]
