"""The task registry, and named task groups. A new task needs a file and a line here (docs/extending.md)."""

from hybridtron.tasks.babilong.stories import STORIES
from hybridtron.tasks.babilong.task import Babilong
from hybridtron.tasks.base import Task
from hybridtron.tasks.copying import Copying
from hybridtron.tasks.mqar import MultiQueryRecall
from hybridtron.tasks.passkey import Passkey
from hybridtron.tasks.recall import JointRecall
from hybridtron.tasks.ruler.cwe import CommonWords
from hybridtron.tasks.ruler.fwe import FrequentWords
from hybridtron.tasks.ruler.niah import NeedleByDepth, Needles
from hybridtron.tasks.ruler.qa import QuestionAnswering
from hybridtron.tasks.ruler.qa_synth import SyntheticQuestions
from hybridtron.tasks.ruler.vt import VariableTracking

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Passkey(),
        NeedleByDepth(),
        Copying(),
        MultiQueryRecall(),
        JointRecall(),
        JointRecall("multilevel_joint_recall", "3-6,3-6,3-6"),
        JointRecall("associative_recall", "5-16"),
        Needles("niah_single_1", "noise"),
        Needles("niah_single_2", "essay"),
        Needles("niah_single_3", "essay", values="uuids"),
        Needles("niah_multikey_1", "essay", num_keys=4),
        Needles("niah_multikey_2", "needle"),
        Needles("niah_multikey_3", "needle", keys="uuids", values="uuids"),
        Needles("niah_multivalue", "essay", num_values=4),
        Needles("niah_multiquery", "essay", num_queries=4),
        VariableTracking(),
        CommonWords(),
        FrequentWords(),
        QuestionAnswering("qa_1", "squad"),
        QuestionAnswering("qa_2", "hotpotqa"),
        SyntheticQuestions("qa_synth_1", 1),
        SyntheticQuestions("qa_synth_2", 2),
        *(Babilong(f"babilong_{story}", story) for story in STORIES),
    )
}

# The columns of the tables in the paper on Expansion Span. The paper's average is over the 11 tasks of all columns.
RULER_SE_GROUPS: dict[str, tuple[str, ...]] = {
    "NIAH-S": ("niah_single_1", "niah_single_2", "niah_single_3"),
    "NIAH-M": ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    "NIAH-M-QV": ("niah_multivalue", "niah_multiquery"),
    "VT": ("vt",),
    "CF-WE": ("cwe", "fwe"),
}
RULER_SE = tuple(name for names in RULER_SE_GROUPS.values() for name in names)
GROUPS: dict[str, tuple[str, ...]] = {
    "babilong": tuple(f"babilong_{story}" for story in STORIES),
    "ruler": (*RULER_SE, "qa_1", "qa_2"),
    "ruler_se": RULER_SE,
    "ruler_hax": (*RULER_SE, "qa_1"),
    "ruler_synth": (*RULER_SE, "qa_synth_1", "qa_synth_2"),
}
