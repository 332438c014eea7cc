"""A linear recurrence over the tokens of a chunk, with a factor for every entry of the state.

    forwards   h_t = a_t h_{t-1} + u_t v_t
    backwards  h_t = a_t h_{t+1} + u_t v_t

h is the state, a_t are its factors, and u_t v_t is the product that token t adds.

A document boundary may lie between token t and the neighbouring token, whose state is h_{t-1} or h_{t+1}. Then t is
called a cut, and the neighbour's state must not enter h_t. The caller passes a_t = 0 at a cut. This suffices if all
values are finite, but 0 times infinity is NaN. So if the final state of the recurrence is not finite, h is computed
again, and at cuts the term with a_t is left out.

Legend: T tokens, B rows (sequences in a batch), N state entries per channel, E channels.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

GROUP = 8  # tokens in a group; groups are computed in parallel, a group's tokens are computed one after another
LARGE_STATE = 2**15  # state entries of all rows together; from this number on, parallel groups gain nothing on a CPU


def recur(
    a_TBNE: Tensor,
    u_TB1E: Tensor,
    v_TBN1: Tensor,
    h_TBNE: Tensor,
    carry_BNE: Tensor,
    cut_TB: Tensor | None,
    back: bool = False,
) -> None:
    """Replace h, which holds u v on entry, by the state at each token.

    `carry_BNE` is the state before the first token. If `back` is True, the recurrence runs from the last token to the
    first, and `carry_BNE` is the state after the last token. `cut_TB` marks the cuts; None means that there are none.
    """
    _recur(a_TBNE, h_TBNE, carry_BNE, None, back)
    if cut_TB is not None and not h_TBNE[0 if back else -1].sum().isfinite():  # inf and nan persist to the end
        torch.mul(u_TB1E, v_TBN1, out=h_TBNE)
        _recur(a_TBNE, h_TBNE, carry_BNE, cut_TB, back)


def _recur(a_TBNE: Tensor, h_TBNE: Tensor, carry_BNE: Tensor, cut_TB: Tensor | None, back: bool) -> None:
    """Run the recurrence once, in place; if `cut_TB` is given, add no state across a cut.

    A few large operations replace a small operation for each token:

    1. Compute all groups of tokens in parallel, each from a zero state.
    2. Compute the state before each group, group after group.
    3. To each token's state, add the state before the token's group, decayed up to the token.

    A group has GROUP tokens, or a single token if groups in parallel would gain nothing.
    """
    one_by_one = h_TBNE.device.type == "cpu" and carry_BNE.numel() >= LARGE_STATE
    size = 1 if one_by_one or len(h_TBNE) % GROUP != 0 else GROUP
    direction = -1 if back else 1
    a = a_TBNE.unflatten(0, (-1, size))
    h = h_TBNE.unflatten(0, (-1, size))
    # since_start becomes the product of the factors from the group's first token (in `order`) to each token
    since_start = a if size == 1 else a.clone()
    cut = None if cut_TB is None else cut_TB.unflatten(0, (-1, size))
    # passed: for each token, True if any token from the group's first token (in `order`) to the token is a cut
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
    """Add factor * before to the part of h with index `place`, except at cuts; return this part of h."""
    if cut is None:
        return h[place].addcmul_(factor[place], before)
    mask = cut[place]
    kept = h[place][mask]
    h[place].addcmul_(factor[place], before)[mask] = kept
    return h[place]
