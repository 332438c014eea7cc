"""Hides known warnings; the server that forks the workers imports this file first."""

from hybridtron.requirements import hide_known_warnings

hide_known_warnings()
