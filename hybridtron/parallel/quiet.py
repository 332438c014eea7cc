"""Hides known warnings when it is imported; `parallel/pool.py` makes its server process import this file first."""

from hybridtron.requirements import hide_known_warnings

hide_known_warnings()
