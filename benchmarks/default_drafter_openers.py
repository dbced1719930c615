"""How the self-made prompts of the default model's drafter begin, for `mlx-dspark train --self-openers`.

    python benchmarks/default_drafter_openers.py > openers.jsonl

About a third each is talk, word problems and mathematics, and programming. A fixed seed chooses the names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"

NAMES = (
    *("Maria", "John", "Ahmed", "Lucy", "Tom", "Priya", "Kevin", "Sofia", "Daniel", "Emma", "Carlos", "Mia"),
    *("Peter", "Nina", "Oscar", "Grace", "Henry", "Ella", "Marcus", "Julia", "Omar", "Lily", "Victor"),
    *("Hannah", "Sam", "Olivia", "Raj", "Clara", "Ben", "Zoe"),
)
DOES = (
    *("has", "is", "bought", "sells", "wants to", "earns", "runs", "makes", "spends", "and", "drives"),
    *("reads", "plants", "went to", "decides to", "can", "needs"),
)
PROBLEMS = (
    *("A store", "A bakery", "A farmer", "A school", "A train", "There are", "In a class", "Every day,"),
    *(
        "The price of",
        "A company",
        "A box contains",
        "At a",
        "Two",
        "Three friends",
        "The sum of",
        "A recipe",
    ),
    *("A car", "Last week,", "Each", "A garden", "A movie", "A pizza", "Find the", "What is the value of"),
    *("Let $", "Compute", "If $", "How many", "Find all", "Evaluate", "Simplify", "Suppose", "What is the"),
    *("The equation", "A circle", "The function $f(x)", "Solve for $x$", "Determine", "In triangle $ABC$"),
    *("The product of", "What is the smallest", "Given that"),
)
FUNCTIONS = (
    *("is_", "count_", "find_", "sum_", "get_", "remove_", "max_", "sort_", "check_", "reverse_", "string_"),
    *("make_", "filter_", "list_", "next_", "first_", "common_", "even_", "prime_", "words_", "digits_"),
    *("unique_", "split_", "longest_", "total_", "to_"),
)
CODE = (
    *("Write a function to", "Write a python function to", "Write a Python function that", "Implement"),
    *("Write a function that takes", "Write a function to find", "Write a function to check"),
    *("Write a python function to count", "Write a program", "Write code to", "Write a script"),
    *("Complete the following function:\n```python\ndef", "Fix the bug in this code"),
)
TALK = (
    *("Write a", "How do I", "What is", "What are", "Explain", "Can you", "Give me", "Create a", "Describe"),
    *("Summarize", "Why", "Write an email", "Tell me", "Compare", "List", "Design", "Help me"),
    *("Write a story", "Translate", "Please", "You are", "Imagine", "Who", "When", "In the", "The following"),
    *("Rewrite", "Which", "Should I", "What would", "Compose", "Pretend", "Discuss", "Analyze", "Provide"),
    *("Suggest", "Act as", "Edit the", "Identify", "Evaluate the", "Extract", "Could you", "I want to"),
    *("I'm", "My", "How can", "How does", "What does", "Draft a", "Write a short", "Given the following"),
    *("Read the following", "Develop", "Outline", "Classify", "Generate", "Produce", "Convert"),
)


def openers(rng: random.Random) -> Iterator[tuple[str, str, int]]:
    """Beginnings, set endings, and how often each is listed."""
    for _ in range(240):
        yield f"{rng.choice(NAMES)} {rng.choice(DOES)}", STEPS if rng.random() < 0.75 else "", 1
    for begin in PROBLEMS:
        yield begin, STEPS, 5
        yield begin, "", 1
    for name in FUNCTIONS:
        yield f"{TASK}\ndef {name}", "", 5
        yield f"{TASK}from typing import List\n\n\ndef {name}", "", 5
        yield f"def {name}", "", 1
    for begin in CODE:
        yield begin, "", 9
    yield "", "", 240
    for begin in TALK:
        yield begin, "", 6


def main() -> None:
    for begin, end, times in openers(random.Random(0)):
        line = json.dumps({"begin": begin, "end": end} if end else {"begin": begin})
        print("\n".join([line] * times))


if __name__ == "__main__":
    main()
