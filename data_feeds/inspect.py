"""Show a job's data as the model will see them: python -m data_feeds.inspect --config configs/sft.yaml --n 5"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from configs.reading.load import ConfigError, load
from data_feeds.chat.template import load_tokenizer, render_chat

if TYPE_CHECKING:
    from configs.blocks.evaluation import EvalConfig
    from configs.blocks.rl import RLConfig
    from configs.blocks.supervised import SLConfig
    from data_feeds.examples.examples import Example
    from records.rollout import Trajectory

ABOUT = """Print the first examples of a job as the model will see them, after the chat template and the tokenizer.

For a supervised job (its method learns from demonstrations, pairs or labels), print the decoded tokens: learned ones
are highlighted on a terminal, and stand between [trained] and [/trained] elsewhere. Then print how the first batch is
packed into micro-batches, and what was left out, and why. For a reinforcement learning job, print its prompts as the
engine gets them.
"""
EXAMPLES = """examples:
  python -m data_feeds.inspect --config configs/sft.yaml              the first 5 examples, and the first batch
  python -m data_feeds.inspect --config configs/dpo.yaml --n 1 --ids  a pair, token by token
  python -m data_feeds.inspect --config configs/grpo.yaml             prompts of reinforcement learning
  python -m data_feeds.inspect --config my.yaml --set 'data.sources=[{file: rows.jsonl}]'
"""
TRAINED, CONTEXT = "bold black on green", "dim"
OPEN, CLOSE = "[trained]", "[/trained]"
SHOWN_MICRO_BATCHES = 12


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_feeds.inspect",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="YAML file of a job")
    parser.add_argument("--n", type=int, default=5, help="examples to show (default 5)")
    parser.add_argument(
        "--ids", action="store_true", help="also list every token: its id, text, turn, and if it is learned"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one value of the configuration; repeatable",
    )
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = load_job(options.config, options.set)
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        if hasattr(config, "reward"):
            show_prompts(console, config, tokenizer, options.n, options.ids)
        else:
            show_examples(console, config, tokenizer, options.n, options.ids)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def load_job(path: str, overrides: Sequence[str]) -> Any:
    """Return the configuration of a job, whose kind depends on its method, or on the lack of one.

    Raises:
        ConfigError: the file cannot be read, or a key or value in it is wrong.
    """
    from configs.blocks.evaluation import EvalConfig
    from configs.blocks.rl import RLConfig
    from configs.blocks.supervised import SLConfig
    from configs.reading.files import read_job
    from plugins.kinds import find

    try:
        raw, _ = read_job(Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    block = raw.get("algorithm")
    if block is None:
        return load(path, EvalConfig, overrides)
    name = block.get("name") if isinstance(block, dict) else None
    learns_from_prompts = not isinstance(name, str) or find("method", name).data == "prompts"
    return load(path, RLConfig if learns_from_prompts else SLConfig, overrides)


def show_prompts(console: Console, config: RLConfig | EvalConfig, tokenizer: Any, n: int, ids: bool) -> None:
    """Print the first training prompts, as the engine gets them."""
    from data_feeds.prompts.prompts import load_prompts
    from data_feeds.prompts.sampler import ShuffledPrompts

    sets = load_prompts(config.data, tokenizer)
    for number, prompt in enumerate(ShuffledPrompts(sets.train, config.run.seed).next(n), 1):
        tokens = render_chat(tokenizer, prompt.messages)
        console.rule(f"prompt {number}: {prompt.prompt_id}, {len(tokens)} tokens", align="left")
        console.print(Text(tokenizer.decode(tokens)))
        if ids:
            console.print(Text("\n".join(f"{i:5}  {t:7}  {tokenizer.decode([t])!r}" for i, t in enumerate(tokens))))
        if prompt.answer is not None:
            console.print(Text(f"answer (the model does not see it): {prompt.answer!r}"))
    console.rule("rows", align="left")
    console.print(Text(str(sets)))


def show_examples(console: Console, config: SLConfig, tokenizer: Any, n: int, ids: bool) -> None:
    """Print the first examples of the first batch, how it is packed, and what was left out."""
    from data_feeds.examples.supervised_data import load_supervised_data
    from plugins.kinds import find

    kind: Any = find("method", config.algorithm.name).data
    feed = load_supervised_data(config.data, kind, tokenizer, config.run.seed, max_heldout=n)
    batch = feed.sampler.next(max(n, config.train.batch_size))
    for number, example in enumerate(batch[:n], 1):
        for trajectory in example:
            console.rule(title(number, trajectory), align="left")
            console.print(
                colored(tokenizer, trajectory) if console.is_terminal else Text(marked(tokenizer, trajectory))
            )
            if ids:
                console.print(Text("\n".join(token_lines(tokenizer, trajectory))))
    console.rule(f"packing of the first batch: {config.train.batch_size} examples", align="left")
    for line in layout(batch[: config.train.batch_size], config.train.max_tokens_per_micro_batch, kind == "pairs"):
        console.print(Text(line))
    console.rule("rows", align="left")
    console.print(Text(str(feed)))


def title(number: int, trajectory: Trajectory) -> str:
    what = {None: "", True: ", chosen", False: ", rejected"}[trajectory.chosen]
    cut = ", cut at data.max_tokens" if trajectory.truncated else ""
    tokens = len(trajectory.prompt_ids) + len(trajectory.token_ids)
    return f"example {number}{what}: {trajectory.group_id}, {tokens} tokens, {trajectory.action_tokens} learned{cut}"


def runs(tokenizer: Any, trajectory: Trajectory) -> list[tuple[str, bool]]:
    """Return the decoded tokens as runs of text that are learned or not."""
    tokens = np.concatenate([trajectory.prompt_ids, trajectory.token_ids])
    learned = np.concatenate([np.zeros(len(trajectory.prompt_ids), dtype=np.bool_), trajectory.is_action])
    borders = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(tokens)]
    return [
        (str(tokenizer.decode(tokens[a:b], skip_special_tokens=False)), bool(learned[a]))
        for a, b in itertools.pairwise(borders)
    ]


def marked(tokenizer: Any, trajectory: Trajectory) -> str:
    return "".join(f"{OPEN}{text}{CLOSE}" if is_learned else text for text, is_learned in runs(tokenizer, trajectory))


def colored(tokenizer: Any, trajectory: Trajectory) -> Text:
    styled = Text()
    for text, is_learned in runs(tokenizer, trajectory):
        styled.append(text, style=TRAINED if is_learned else CONTEXT)
    return styled


def token_lines(tokenizer: Any, trajectory: Trajectory) -> list[str]:
    """Return one line per token: its place, id and text, and its turn if it is learned."""
    lines = [f"{i:5}  {t:7}  {tokenizer.decode([t])!r}" for i, t in enumerate(trajectory.prompt_ids.tolist())]
    start = len(lines)
    for i, (t, learned, turn) in enumerate(
        zip(trajectory.token_ids.tolist(), trajectory.is_action, trajectory.turn, strict=True), start
    ):
        lines.append(f"{i:5}  {t:7}  {tokenizer.decode([t])!r}{f'  learned, turn {turn + 1}' if learned else ''}")
    return lines


def layout(batch: Sequence[Example], max_tokens: int, are_pairs: bool) -> list[str]:
    """Return lines on the micro-batches that a batch becomes on one rank: their tokens, segments and learned tokens."""
    from data_feeds.packing import pack
    from data_feeds.responses import Responses

    members = [trajectory for example in batch for trajectory in example]
    groups = np.repeat(np.arange(len(batch)), [len(example) for example in batch])
    (micro_batches,) = pack(
        Responses(members), groups, np.ones(len(members)), {}, max_tokens, ranks=1, share_prompts=are_pairs,
        whole_groups=are_pairs,
    )  # fmt: skip
    lines = []
    for number, micro in enumerate(micro_batches[:SHOWN_MICRO_BATCHES], 1):
        segments = " ".join(f"+{s.length}" if s.prefix_length else str(s.length) for s in micro.segments[:20])
        more = f" and {len(micro.segments) - 20} more" if len(micro.segments) > 20 else ""
        lines.append(
            f"micro-batch {number}: {micro.tokens} of {max_tokens} tokens, {len(micro.trajectory_index)} responses, "
            f"{len(micro.targets)} learned tokens ({len(micro.targets) / micro.tokens:.0%}); segments {segments}{more}"
        )
    if len(micro_batches) > SHOWN_MICRO_BATCHES:
        lines.append(f"and {len(micro_batches) - SHOWN_MICRO_BATCHES} more micro-batches")
    computed = sum(micro.tokens for micro in micro_batches)
    alone = sum(len(t.prompt_ids) + int(np.flatnonzero(t.is_action)[-1]) for t in members)
    padded = max(len(t.prompt_ids) + len(t.token_ids) for t in members) * len(members)
    learned = sum(len(micro.targets) for micro in micro_batches)
    lines.append(
        f"together: {computed} tokens computed, {learned} learned; one by one it would be {alone} ({alone - computed} "
        f"are shared), padded to the longest {padded}"
    )
    if are_pairs:
        lines.append("a segment +n also sees the one before it that has no +: the pair's prompt, computed once")
    return lines


if __name__ == "__main__":
    sys.exit(main())
