"""Do teacher and student speak of the same things: vocabularies by id, classes by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from compressor.errors import InputRefused


def shared_vocabulary(
    teacher_tokenizer: Any, student_tokenizer: Any, teacher_rows: int, student_rows: int
) -> int:
    """How many ids both models have, when their tokenizers agree.

    Models of one family often pad the same vocabulary to different sizes (Qwen2.5: 151,936 and 152,064
    rows); then the first ids up to the smaller size are shared and the rest does not take part.
    Raises InputRefused when a token has different ids.
    """
    teacher, student = teacher_tokenizer.get_vocab(), student_tokenizer.get_vocab()
    differing = [token for token in teacher.keys() & student.keys() if teacher[token] != student[token]]
    # A token that only one tokenizer has is harmless when it was added after all the common ones.
    last = max((teacher[token] for token in teacher.keys() & student.keys()), default=-1)
    only_one = [
        token
        for token in teacher.keys() ^ student.keys()
        if (teacher[token] if token in teacher else student[token]) <= last
    ]
    if differing or only_one:
        example = sorted(differing or only_one)[0]
        raise InputRefused(
            f"teacher and student have different tokenizers: {len(differing or only_one)} tokens have other ids, for example "
            f"{example!r} ({teacher.get(example)} and {student.get(example)}): choose a student of the teacher's family"
        )
    return min(teacher_rows, student_rows)


def class_names(config: Any) -> tuple[str, ...]:
    """Names of a classifier's classes in the order of its outputs; placeholders LABEL_0 … when it has no others."""
    id2label: Mapping[int, str] = getattr(config, "id2label", None) or {}
    return tuple(id2label[i] for i in range(len(id2label)))


def class_order(teacher: Sequence[str], student: Sequence[str]) -> list[int] | None:
    """Student output that means the same as each of the teacher's, or None when the order is equal.

    Raises InputRefused when they do not have the same names.
    """
    if list(teacher) == list(student):
        return None
    by_name = {name.casefold(): i for i, name in enumerate(student)}
    order = [by_name.get(name.casefold(), -1) for name in teacher]
    if len(teacher) != len(student) or -1 in order:
        raise InputRefused(
            f"teacher and student have different classes: {', '.join(teacher)} and {', '.join(student)}: "
            "set the student's id2label to the teacher's names"
        )
    return order
