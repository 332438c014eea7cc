"""BABILong's prompts: an instruction, examples, and the required answer format.

The wording, including misspellings, is copied from the public prompts. Only a misplaced `<context>` in qa10's examples
is left out. In a sample, the long text and the question follow the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

FROM_FACTS = "You need to answer the question based only on the information from the facts."
HIDDEN = "hidden in some random text and a question."
PLACES = (
    f"I will give you context with the facts about people and their locations {HIDDEN} {FROM_FACTS} "
    "If a person was in different locations, use the latest location the person was in to answer the question."
)
OBJECTS = (
    f"I give you context with the facts about locations and actions of different persons {HIDDEN}{{}}{FROM_FACTS}\n"
    "If a person got an item in the first location and travelled to the second location the item is also in the "
    "second location. If a person dropped an item in the first location and moved to the second location the item "
    "remains in the first location."
)
CARRIED = f"I will give you context with the facts about people and objects they carry, {HIDDEN} {FROM_FACTS}"
FORMAT = "Always return your answer in the following format: {} Do not write anything else after that."
ONE_WORD = "Your answer should contain only one word{} Do not write anything else{} Do not explain your answer."


@dataclass(frozen=True)
class Prompt:
    """The prompt for one of bAbI's tasks.

    instruction  the first paragraph
    examples     pairs (facts with a question, answer)
    post         the required answer format
    answer       template for answers in training data: {answer} is the answer, and numbered fields are the entries of
                 `stories.Asked.about`
    between      separator between examples
    """

    instruction: str
    examples: tuple[tuple[str, str], ...]
    post: str
    answer: str = "{answer}"
    between: str = "\n"

    def head(self) -> str:
        """Return instruction, examples and answer format as one text."""
        example_texts = [f"<example>\n{facts}\nAnswer: {answer}\n</example>" for facts, answer in self.examples]
        return f"{self.instruction}\n\n{self.between.join(example_texts)}\n\n{self.post}"


PROMPTS: dict[str, Prompt] = {
    "qa1": Prompt(
        f"I will give you context with the facts about positions of different persons {HIDDEN} {FROM_FACTS} "
        "If a person was in different locations, use the latest location to answer the question.",
        (
            (
                "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony. "
                "Where is Charlie?",
                "The most recent location of Charlie is balcony.",
            ),
            (
                "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. "
                "Rouse travelled to balcony. Where is Alan?",
                "The most recent location of Alan is shop.",
            ),
        ),
        FORMAT.format("The most recent location of ’person’ is ’location’."),
        "The most recent location of {0} is {answer}.",
        between="\n\n",
    ),
    "qa2": Prompt(
        OBJECTS.format(""),
        (
            (
                "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. Where is the bottle?",
                "The bottle is in the balcony.",
            ),
            (
                "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen. "
                "Where is the screw driver?",
                "The screw driver is in the kitchen.",
            ),
        ),
        FORMAT.format("The ’item’ is in ’location’."),
        "The {0} is in the {answer}.",
    ),
    "qa3": Prompt(
        OBJECTS.format(" "),
        (
            (
                "John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. "
                "Daniel journeyed to the bedroom. Daniel moved to the garden. Mary travelled to the kitchen. "
                "Where was the apple before the kitchen?",
                "Before the kitchen the apple was in the bathroom.",
            ),
            (
                "John went back to the bedroom. John went back to the garden. John went back to the kitchen. "
                "Sandra took the football. Sandra travelled to the garden. Sandra journeyed to the bedroom. "
                "Where was the football before the bedroom?",
                "Before the bedroom the football was in the garden.",
            ),
        ),
        FORMAT.format("Before the $location_1$ the $item$ was in the $location_2$."),
        "Before the {0} the {1} was in the {answer}.",
    ),
    "qa4": Prompt(
        "I will give you context with the facts about different people, their location and actions, "
        f"{HIDDEN} {FROM_FACTS}",
        (
            (
                "The hallway is south of the kitchen. The bedroom is north of the kitchen. "
                "What is the kitchen south of?",
                "bedroom",
            ),
            (
                "The garden is west of the bedroom. The bedroom is west of the kitchen. What is west of the bedroom?",
                "garden",
            ),
        ),
        "Your answer should contain only one word - location. Do not write anything else after that.",
    ),
    "qa5": Prompt(
        f"I will give you context with the facts about locations and their relations {HIDDEN} {FROM_FACTS}",
        (
            (
                "Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to the bedroom. "
                "Bill took the milk there. Who did Mary give the apple to?",
                "Fred",
            ),
            (
                "Jeff took the football there. Jeff passed the football to Fred. Jeff got the milk there. "
                "Bill travelled to the bedroom. Who gave the football?",
                "Jeff",
            ),
            (
                "Fred picked up the apple there. Fred handed the apple to Bill. Bill journeyed to the bedroom. "
                "Jeff went back to the garden. What did Fred give to Bill?",
                "apple",
            ),
        ),
        ONE_WORD.format(".", " after that."),
    ),
    "qa6": Prompt(
        PLACES,
        (
            ("John travelled to the hallway. John travelled to the garden. Is John in the garden?", "yes"),
            (
                "Mary went to the office. Daniel journeyed to the hallway. Mary went to the bedroom. "
                "Sandra went to the garden. Is Mary in the office?",
                "no",
            ),
        ),
        ONE_WORD.format(" - $yes$ or $no$.", " after that."),
    ),
    "qa7": Prompt(
        CARRIED,
        (
            ("Daniel went to the bedroom. Daniel got the apple there. How many objects is Daniel carrying?", "one"),
            ("Mary grabbed the apple there. Mary gave the apple to John. How many objects is Mary carrying?", "none"),
            (
                "Sandra travelled to the hallway. Sandra picked up the milk there. Sandra took the apple there. "
                "Mary travelled to the garden. How many objects is Sandra carrying?",
                "two",
            ),
        ),
        ONE_WORD.format(" - $none$ or $number_of_objects$.", " after that."),
    ),
    "qa8": Prompt(
        CARRIED,
        (
            ("Sandra travelled to the garden. Mary grabbed the milk there. What is Mary carrying?", "milk"),
            (
                "Mary travelled to the kitchen. Sandra travelled to the office. John travelled to the office. "
                "Sandra discarded the milk there. What is Sandra carrying?",
                "nothing",
            ),
            (
                "Daniel grabbed the apple there. Mary went to the office. Daniel moved to the garden. "
                "Daniel grabbed the milk there. Mary went to the kitchen. What is Daniel carrying?",
                "apple,milk",
            ),
        ),
        "Your answer should contain only one or two words: $nothing$ or $object$ or $object_1$, $object_2$. "
        "Do not write anything else. Do not explain your answer.",
    ),
    "qa9": Prompt(
        PLACES,
        (
            ("John is not in the bathroom. Sandra is not in the bedroom. Is John in the bathroom?", "no"),
            (
                "Mary journeyed to the kitchen. John is in the bedroom. Sandra is not in the garden. "
                "Is Mary in the kitchen?",
                "yes",
            ),
        ),
        ONE_WORD.format(" - $yes$ or $no$.", "."),
    ),
    "qa10": Prompt(
        PLACES,
        (
            (
                "Bill is in the kitchen. Julie is either in the school or the cinema. Is Bill in the bedroom?",
                "no",
            ),
            (
                "Fred is in the bedroom. Mary is either in the school or the cinema. Is Mary in the school?",
                "maybe",
            ),
            ("Fred is either in the kitchen or the park. Bill moved to the cinema. Is Bill in the cinema?", "yes"),
        ),
        ONE_WORD.format(" - $yes$ or $no$ or $maybe$.", "."),
    ),
}
