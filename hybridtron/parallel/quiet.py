"""Hides known warnings; the first import of the server that forks the workers, a process of ours alone."""

from hybridtron.requirements import hide_known_warnings

hide_known_warnings()
