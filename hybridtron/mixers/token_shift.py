"""The token before a row and the row's last token: RWKV's mixers interpolate each token with its predecessor."""

from __future__ import annotations

from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.parallel.context import halo_tokens


def tokens_at_ends(x_LBD: Tensor, last_BD: Tensor | None, seq: SeqInfo) -> tuple[Tensor | None, Tensor]:
    """Return the predecessors of the rows' first tokens (B, D), or None for zeros, and the rows' last tokens (B, D).

    There are L tokens and B rows (sequences); D is the width. If the rows continue earlier rows, `last_BD` holds the
    earlier rows' last tokens, else it is None. Under sequence parallelism, call this function after `gather_input`,
    because the predecessor of a rank's first token is on another rank.
    """
    if last_BD is None:
        carried_B1D = None
    else:
        carried_B1D = last_BD.to(x_LBD.dtype).unsqueeze(1)
    first_B1D = halo_tokens(x_LBD.transpose(0, 1), 1, carried_B1D, seq)
    first_BD = None if first_B1D is None else first_B1D.squeeze(1)
    return first_BD, x_LBD[-1].clone()  # a view would keep the full row in memory
