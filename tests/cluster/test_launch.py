"""The place of a rank that srun has started, without torchrun's variables."""

from __future__ import annotations

import pytest

from hybridtron.device import device_index
from hybridtron.parallel.groups import _check_meeting_place
from hybridtron.problems import ConfigError


@pytest.mark.parametrize(
    ("environment", "visible", "index"),
    [
        ({}, 8, 0),
        ({"SLURM_LOCALID": "5"}, 8, 5),
        ({"SLURM_LOCALID": "5"}, 1, 0),  # SLURM shows each process its own device alone
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "3"}, 1, 0),  # also where a wrapper names its place
        ({"SLURM_LOCALID": "3"}, 2, 1),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 8, 3),  # torchrun inside a task
    ],
)
def test_process_uses_the_device_of_its_local_rank(environment: dict[str, str], visible: int, index: int) -> None:
    assert device_index(environment, visible) == index


def test_missing_address_of_the_first_rank_is_reported() -> None:
    _check_meeting_place({"MASTER_ADDR": "n1", "MASTER_PORT": "20001"})
    with pytest.raises(ConfigError) as refused:
        _check_meeting_place({"MASTER_ADDR": "n1"})
    assert [(p.key, p.code) for p in refused.value.problems] == [("MASTER_PORT", "missing")]
