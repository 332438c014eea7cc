"""Names of tasks that the rules and the solvers treat alike."""

NEEDLES = (
    *("single_1", "single_2", "single_3"),
    *("multikey_1", "multikey_2", "multikey_3"),
    *("multivalue", "multiquery"),
)
