"""Imported first by the server that workers are forked from, a process of ours alone: it warns of nothing known."""

from hybridtron.requirements import hide_known_warnings

hide_known_warnings()
