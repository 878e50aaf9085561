"""More text for the teacher to answer: variants of the training examples of a classifier, without labels.

A teacher that was fine-tuned on few examples is sure of all of them, so its answers on them say little more than
the labels do. On texts it has not seen they do. The variants are random stretches of the text, as in Tang et al. 2019
(arXiv 1903.12136), and texts with some tokens replaced by ones drawn from all training texts (unigram noise of
Xie et al. 2017, arXiv 1703.02573), which taught more than masked ones.
"""

import numpy as np

from compressor.distillation.tasks import IGNORED, Example, Examples, example_of

_REPLACED_SHARE = 0.2


def augmented(examples: Examples, copies: int, *, special_ids: frozenset[int], seed: int) -> Examples:
    """``examples`` followed by ``copies`` variants of each, labelled IGNORED: losses on labels leave them out.

    Half of the variants are stretches of at least two ordinary tokens; in the other half tokens are replaced.
    ``special_ids`` stay where they are.
    """
    rng = np.random.default_rng([seed, 2])
    special = list(special_ids)
    texts = np.concatenate([np.array(example.inputs["input_ids"]) for example in examples.items])
    pool = texts[~np.isin(texts, special)]
    variants: list[Example] = []
    for _ in range(copies):
        for example in examples.items:
            ids = np.array(example.inputs["input_ids"])
            ordinary = np.flatnonzero(~np.isin(ids, special))
            keep = np.ones(len(ids), dtype=bool)
            if rng.random() < 0.5 and len(ordinary) > 2:
                length = rng.integers(2, len(ordinary))
                first = rng.integers(0, len(ordinary) - length + 1)
                keep[ordinary] = False
                keep[ordinary[first : first + length]] = True
            elif len(ordinary):
                replaced = ordinary[rng.random(len(ordinary)) < _REPLACED_SHARE]
                ids[replaced] = rng.choice(pool, len(replaced))
            inputs = {name: np.array(values)[keep].tolist() for name, values in example.inputs.items()}
            inputs["input_ids"] = ids[keep].tolist()
            variants.append(example_of(inputs, [IGNORED]))
    return examples.extended(variants)
