"""The recipes as parameters of tests. Ablations, which vary another recipe, and further sizes are slow tests."""

from __future__ import annotations

import re

from hybridtron.config.load import choices_of
from tests.slow import slow_except

SIZE = re.compile(r"_[\d.]+[mb](?=_|$)")
NAMES = [name for name in choices_of("recipe") if not name.startswith("length/")]  # those start from a checkpoint
FIRST_SIZES = {SIZE.sub("", name): name for name in reversed(NAMES)}
FAST = [name for name in FIRST_SIZES.values() if not name.startswith("ablations/")]
RECIPES = slow_except(NAMES, *FAST)
