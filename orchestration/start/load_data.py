"""Read and check the data of a job before anything heavy starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig

if TYPE_CHECKING:
    from data_feeds.examples.supervised_data import SupervisedData
    from data_feeds.prompts.prompts import PromptSets


def load_prompt_sets(config: RLConfig | EvalConfig) -> PromptSets:
    """Return the prompts of a job that generates.

    Raises:
        ValueError: the model has no chat template, or a source is wrong.
    """
    from data_feeds.chat.template import load_prompt_tokenizer
    from data_feeds.prompts.prompts import load_prompts

    tokenizer = load_prompt_tokenizer(config.model.path, config.model.trust_remote_code)
    return load_prompts(config.data, tokenizer)


def load_examples(config: SLConfig) -> SupervisedData:
    """Return the examples of a supervised job.

    Raises:
        ValueError: the model has no chat template, or a source is wrong.
    """
    from data_feeds.chat.template import load_tokenizer
    from data_feeds.examples.supervised_data import load_supervised_data

    kind = config.algorithm.make_method().data
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    return load_supervised_data(config.data, kind, tokenizer, config.run.seed, config.eval.max_examples)  # type: ignore[arg-type]


def supervised_steps(config: SLConfig, examples: SupervisedData) -> int:
    """Return the number of optimizer updates of a supervised job: as configured, or what its epochs take."""
    return config.train.steps or math.ceil(config.train.epochs * examples.training_rows / config.train.batch_size)
